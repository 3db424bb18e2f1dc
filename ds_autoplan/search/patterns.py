"""Sharding patterns inside one block: a registry per operator kind, enumerated, connected, priced.

Projections that read the same input (q, k, v; gate, up) are one node. A block is the chain

    stream -> qkv -> attention core -> out -> stream -> up -> activation -> down -> stream

and every linear node has three patterns, each with the layout it needs and the one it makes:

    column     replicated -> sharded     (backward: all-reduce of the input's gradient)
    row        sharded    -> partial
    replicate  replicated -> replicated

Layouts are "R" (replicated over tp), "S" (sharded by features) and "P" (partial sums). The stream
between blocks is R. Attention core and activation keep R or S and cannot take P: patterns that
bring it to them do not connect. Going from one layout to another is a re-layout with its
collective: P -> R all-reduce, P -> S reduce-scatter, S -> R all-gather, R -> S a slice
(all-gathered backward).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.cost.shapes import attention_flops
from ds_autoplan.model.graph import BlockClass
from ds_autoplan.search.problem import Choice, pareto
from ds_autoplan.strategy import Degrees, Strategy

PATTERNS = {"column": ("R", "S"), "row": ("S", "P"), "replicate": ("R", "R")}
_GROUPS = (
    ("qkv", ("q", "k", "v", "qkv")),
    ("out", ("attention_out",)),
    ("up", ("gate", "up", "gate_up")),
    ("down", ("down",)),
)
# bf16 weights, fp32 master and two moments, fp32 gradient: bytes of state per parameter, unsharded
STATE_BYTES = 18.0


@dataclass(frozen=True)
class Node:
    """One linear node: its shape and which patterns its sizes allow at a tp degree."""

    name: str
    size_in: int
    size_out: int
    parameters: int
    legal: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """A pattern for each node of a block, priced."""

    names: tuple[str, ...]
    time_s: float
    bytes: float


@dataclass(frozen=True)
class Folding:
    """What folding and enumeration did: counts for the report, and the kept patterns."""

    operators: int
    distinct_blocks: int
    candidates: int
    rejected: int
    kept: tuple[Pattern, ...]


class BlockPatterns:
    """Prices the patterns of one block class at given degrees."""

    def __init__(self, cost: AnalyticCostModel, block: BlockClass, degrees: Degrees) -> None:
        """Collect the block's nodes."""
        self.setting = cost.setting
        self.block, self.degrees = block, degrees
        self.tokens = cost.setting.tokens(degrees)
        self.hidden = block.hidden_size or cost.graph.hidden_size
        self.nodes = tuple(
            node for name, roles in _GROUPS if (node := self._node(name, roles)) is not None
        )

    def _node(self, name: str, roles: tuple[str, ...]) -> Node | None:
        operators = [o for o in self.block.operators if o.kind == "linear" and o.role in roles]
        if not operators:
            return None
        tp = self.degrees.tp
        attention = self.block.attention
        heads = attention.num_heads if attention is not None else tp
        by_heads = name in ("qkv", "out")
        size_in, size_out = operators[0].in_features, sum(o.out_features for o in operators)
        legal = ["replicate"]
        if size_out % tp == 0 and (name != "qkv" or heads % tp == 0):
            legal.append("column")
        if size_in % tp == 0 and (name != "out" or not by_heads or heads % tp == 0):
            legal.append("row")
        count = sum(o.num_parameters for o in operators)
        return Node(name, size_in, size_out, count, tuple(legal))

    def node_price(self, node: Node, pattern: str) -> tuple[float, float]:
        """(seconds, bytes) of a node: its three GEMMs, column's backward all-reduce, its state."""
        tp, m = self.degrees.tp, self.tokens
        k = node.size_in / tp if pattern == "row" else node.size_in
        n = node.size_out / tp if pattern == "column" else node.size_out
        gemm = self.setting.kernels.gemm_s
        time_s = gemm(m, k, n, 1) + gemm(m, n, k, 1) + gemm(k, m, n, 1)
        if pattern == "column" and tp > 1:
            time_s += self._collective("all_reduce", node.size_in)
        share = 1 if pattern == "replicate" else tp
        kept = m * n * self.setting.element
        return time_s, node.parameters / share * STATE_BYTES + kept

    def core_price(self, after: str, layout: str) -> float:
        """Seconds of what follows a node and keeps its layout: attention core or activation."""
        ways = self.degrees.tp if layout == "S" else 1
        if after == "qkv" and self.block.attention is not None:
            seq = self.setting.workload.seq_length
            flops = attention_flops(self.block.attention, self.tokens, seq, ways)
            kernels = self.setting.kernels
            return kernels.attention_s(flops, False) + kernels.attention_s(flops, True)
        if after == "up" and self.block.mlp is not None:
            moved = 3.0 * self.tokens * self.block.mlp.intermediate_size * self.setting.element
            return 3.0 * self.setting.kernels.stream_s(moved / ways)
        return 0.0

    def relayout_s(self, before: str, after: str, width: int) -> float:
        """Seconds to go from one layout to another and back, for `width` features a token."""
        if self.degrees.tp == 1 or before == after:
            return 0.0
        kind = {"PR": "all_reduce", "PS": "reduce_scatter"}.get(before + after, "all_gather")
        return self._collective(kind, width)

    def _collective(self, kind: str, width: int) -> float:
        bytes_ = self.tokens * width * self.setting.element
        return self.setting.collective(kind, bytes_, self.degrees, "tp")

    def edge_s(self, at: int, pattern: str, following: str | None) -> float | None:
        """Seconds from node `at` to the next (None: the stream); None if that does not connect."""
        node = self.nodes[at]
        made = PATTERNS[pattern][1]
        wanted = PATTERNS[following][0] if following is not None else "R"
        if node.name in ("qkv", "up"):  # a core lies between: it takes R or S, and keeps it
            if made == "P":
                return None
            width = self._core_width(node)
            return self.core_price(node.name, made) + self.relayout_s(made, wanted, width)
        to_stream = self.relayout_s(made, "R", node.size_out)
        return to_stream + self.relayout_s("R", wanted, self.hidden)

    def _core_width(self, node: Node) -> int:
        following = self.nodes[self.nodes.index(node) + 1]
        return following.size_in

    def first_s(self, pattern: str) -> float:
        """Seconds from the stream into the first node."""
        return self.relayout_s("R", PATTERNS[pattern][0], self.nodes[0].size_in)

    def price(self, names: tuple[str, ...]) -> Pattern | None:
        """A whole block's pattern, or None where it is not legal or does not connect."""
        if any(name not in node.legal for name, node in zip(names, self.nodes, strict=True)):
            return None
        time_s, bytes_ = self.first_s(names[0]), 0.0
        for at, (node, name) in enumerate(zip(self.nodes, names, strict=True)):
            seconds, state = self.node_price(node, name)
            edge = self.edge_s(at, name, names[at + 1] if at + 1 < len(names) else None)
            if edge is None:
                return None
            time_s += seconds + edge
            bytes_ += state
        return Pattern(names, time_s, bytes_)

    def enumerate(self) -> tuple[int, list[Pattern]]:
        """(number of candidates, those that connect) over 3 ** nodes patterns.

        Each node and each edge is priced once; a pattern's price is their sum.
        """
        if not self.nodes:  # a mixer and experts only: nothing for these patterns to split
            return 0, []
        last = len(self.nodes) - 1
        prices = [{name: self.node_price(node, name) for name in node.legal} for node in self.nodes]
        edges = [
            {
                (name, following): self.edge_s(at, name, following)
                for name in node.legal
                for following in (self.nodes[at + 1].legal if at < last else (None,))
            }
            for at, node in enumerate(self.nodes)
        ]
        first = {name: self.first_s(name) for name in self.nodes[0].legal}
        connected = []
        for names in itertools.product(*(node.legal for node in self.nodes)):
            steps = [edges[at][names[at], names[at + 1]] for at in range(last)]
            steps.append(edges[last][names[last], None])
            seconds = [step for step in steps if step is not None]
            if len(seconds) <= last:
                continue
            parts = [prices[at][name] for at, name in enumerate(names)]
            time_s = first[names[0]] + sum(seconds) + sum(part[0] for part in parts)
            connected.append(Pattern(names, time_s, sum(part[1] for part in parts)))
        return len(PATTERNS) ** len(self.nodes), connected


def choices(patterns: list[Pattern]) -> tuple[Choice, ...]:
    """The Pareto set of patterns as choices of the stage problem, named by the pattern."""
    return pareto(
        [
            Choice(p.time_s, p.bytes, 0.0, 0.0, 0.0, Strategy("-".join(p.names), "pattern"))
            for p in patterns
        ]
    )


def fold(cost: AnalyticCostModel, degrees: Degrees) -> Folding:
    """Fold a model: enumerate the patterns of each distinct block once and keep the Pareto sets."""
    candidates = rejected = 0
    kept: list[Pattern] = []
    for block in cost.graph.classes:
        total, connected = BlockPatterns(cost, block, degrees).enumerate()
        candidates += total
        rejected += total - len(connected)
        best = {choice.strategy.attention for choice in choices(connected)}
        kept += [pattern for pattern in connected if "-".join(pattern.names) in best]
    operators = sum(len(cost.graph.classes[layer].operators) for layer in cost.graph.layers)
    return Folding(operators, len(cost.graph.classes), candidates, rejected, tuple(kept))

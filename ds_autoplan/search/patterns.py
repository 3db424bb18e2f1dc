"""Sharding patterns inside one block: a registry per operator kind, enumerated, connected, priced.

Projections that read the same input (q, k, v; gate, up) are one node, and so are the experts of a
mixture. A block is the chain

    stream -> qkv -> attention core -> out -> stream -> up -> activation -> down -> stream

with "experts" beside or instead of up and down. Layouts are "R" (replicated over tp), "S" (sharded
by features), "P" (partial sums) and "T" (sharded by tokens). Every node has patterns, each with the
layout it needs and the one it makes:

    linear      column     R -> S   (backward: all-reduce of the input's gradient)
                row        S -> P
                replicate  R -> R
    experts     shard      R -> P   (each expert's width over tp)
                expert     R -> P   (whole experts over tp)
                replicate  R -> R
    norm        replicate  R -> R
                sequence   T -> T   (sequence parallelism: the stream and its norms stay in T)
    vocabulary  shard      rows of the embedding, columns of the head, loss over shards
                replicate

Attention core and activation keep R or S and cannot take P: patterns that bring it to them do not
connect; nor do an embedding and a head that share a weight and differ. Going from one layout to
another is a re-layout with its collective: P -> R all-reduce, P -> S or T reduce-scatter, S or T ->
R all-gather, R -> S or T a slice (all-gathered backward).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.cost.shapes import attention_flops
from ds_autoplan.model.graph import BlockClass
from ds_autoplan.search.problem import Choice, pareto
from ds_autoplan.strategy import Degrees, Strategy

PATTERNS = {"column": ("R", "S"), "row": ("S", "P"), "replicate": ("R", "R")}
REGISTRY = {
    "linear": PATTERNS,
    "experts": {"shard": ("R", "P"), "expert": ("R", "P"), "replicate": ("R", "R")},
    "norm": {"replicate": ("R", "R"), "sequence": ("T", "T")},
    "vocabulary": {"shard": ("R", "P"), "replicate": ("R", "R")},
}
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
    """One node: its kind, its shape and which patterns its sizes allow at a tp degree."""

    name: str
    kind: str
    size_in: int
    size_out: int
    parameters: int
    legal: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """A pattern for each node of a block, and for its norms, priced."""

    names: tuple[str, ...]
    time_s: float
    bytes: float
    norm: str = "replicate"

    @property
    def name(self) -> str:
        """All choices in one word."""
        return "-".join(self.names) + ("-sequence" if self.norm == "sequence" else "")


@dataclass(frozen=True)
class Folding:
    """What folding and enumeration did: counts for the report, and the kept patterns.

    `vocabulary` are the kept (embedding, head) patterns, which the counts leave out.
    """

    operators: int
    distinct_blocks: int
    candidates: int
    rejected: int
    kept: tuple[Pattern, ...]
    vocabulary: tuple[tuple[str, str], ...]


class BlockPatterns:
    """Prices the patterns of one block class at given degrees."""

    def __init__(self, cost: AnalyticCostModel, block: BlockClass, degrees: Degrees) -> None:
        """Collect the block's nodes."""
        self.setting = cost.setting
        self.block, self.degrees = block, degrees
        self.tokens = cost.setting.tokens(degrees)
        self.hidden = block.hidden_size or cost.graph.hidden_size
        nodes = [self._node(name, roles) for name, roles in _GROUPS]
        self.nodes = tuple(node for node in (*nodes, self._experts()) if node is not None)
        self.norms = sum(o.kind == "norm" for o in block.operators)

    def _experts(self) -> Node | None:
        mlp, tp = self.block.mlp, self.degrees.tp
        count = sum(o.num_parameters for o in self.block.operators if o.kind == "experts")
        if mlp is None or not mlp.num_experts or not count:
            return None
        legal = ["replicate"]
        if mlp.intermediate_size % tp == 0:
            legal.append("shard")
        if mlp.num_experts % tp == 0:
            legal.append("expert")
        return Node("experts", "experts", self.hidden, self.hidden, count, tuple(legal))

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
        return Node(name, "linear", size_in, size_out, count, tuple(legal))

    def node_price(self, node: Node, pattern: str, norm: str = "replicate") -> tuple[float, float]:
        """(seconds, bytes) of a node: its GEMMs, column's backward reduction, its state.

        Where the stream is sharded by tokens, the reduction scatters the gradient.
        """
        if node.kind == "experts":
            return self._experts_price(node, pattern)
        tp, m = self.degrees.tp, self.tokens
        k = node.size_in / tp if pattern == "row" else node.size_in
        n = node.size_out / tp if pattern == "column" else node.size_out
        gemm = self.setting.kernels.gemm_s
        time_s = gemm(m, k, n, 1) + gemm(m, n, k, 1) + gemm(k, m, n, 1)
        if pattern == "column" and tp > 1:
            kind = "reduce_scatter" if norm == "sequence" else "all_reduce"
            time_s += self._collective(kind, node.size_in)
        share = 1 if pattern == "replicate" else tp
        kept = m * n * self.setting.element
        return time_s, node.parameters / share * STATE_BYTES + kept

    def _experts_price(self, node: Node, pattern: str) -> tuple[float, float]:
        mlp, tp = self.block.mlp, self.degrees.tp
        if mlp is None:
            raise AssertionError("an experts node without a mixture")
        count = mlp.num_experts / (tp if pattern == "expert" else 1)
        width = mlp.intermediate_size / (tp if pattern == "shard" else 1)
        routed = self.tokens * mlp.top_k / mlp.num_experts
        up = width * (2 if mlp.gated else 1)
        gemm = self.setting.kernels.gemm_s
        time_s = 0.0
        for k, n in ((self.hidden, up), (width, self.hidden)):
            time_s += gemm(routed, k, n, count) + gemm(routed, n, k, count)
            time_s += gemm(k, routed, n, count)
        kept = routed * count * (up + self.hidden) * self.setting.element
        share = 1 if pattern == "replicate" else tp
        return time_s, node.parameters / share * STATE_BYTES + kept

    def norm_price(self, norm: str) -> tuple[float, float]:
        """(seconds, bytes) of the block's norms, forward and backward, and what they keep."""
        ways = self.degrees.tp if norm == "sequence" else 1
        size = self.norms * self.tokens * self.hidden * self.setting.element / ways
        # read and write forward; gradient and input read, gradient written backward
        return self.setting.kernels.stream_s(5.0 * size), size

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
        kinds = {"PR": "all_reduce", "PS": "reduce_scatter", "PT": "reduce_scatter"}
        return self._collective(kinds.get(before + after, "all_gather"), width)

    def _collective(self, kind: str, width: int) -> float:
        bytes_ = self.tokens * width * self.setting.element
        return self.setting.collective(kind, bytes_, self.degrees, "tp")

    def edge_s(
        self, at: int, pattern: str, following: str | None, norm: str = "replicate"
    ) -> float | None:
        """Seconds from node `at` to the next (None: the stream); None if that does not connect."""
        node = self.nodes[at]
        made = REGISTRY[node.kind][pattern][1]
        stream = REGISTRY["norm"][norm][0]
        wanted = stream
        if following is not None:
            wanted = REGISTRY[self.nodes[at + 1].kind][following][0]
        if node.name in ("qkv", "up"):  # a core lies between: it takes R or S, and keeps it
            if made == "P":
                return None
            width = self._core_width(node)
            return self.core_price(node.name, made) + self.relayout_s(made, wanted, width)
        to_stream = self.relayout_s(made, stream, node.size_out)
        return to_stream + self.relayout_s(stream, wanted, self.hidden)

    def _core_width(self, node: Node) -> int:
        following = self.nodes[self.nodes.index(node) + 1]
        return following.size_in

    def first_s(self, pattern: str, norm: str = "replicate") -> float:
        """Seconds from the stream into the first node."""
        first, stream = self.nodes[0], REGISTRY["norm"][norm][0]
        return self.relayout_s(stream, REGISTRY[first.kind][pattern][0], first.size_in)

    def price(self, names: tuple[str, ...], norm: str = "replicate") -> Pattern | None:
        """A whole block's pattern, or None where it is not legal or does not connect."""
        if any(name not in node.legal for name, node in zip(names, self.nodes, strict=True)):
            return None
        time_s, bytes_ = self.norm_price(norm)
        time_s += self.first_s(names[0], norm)
        for at, (node, name) in enumerate(zip(self.nodes, names, strict=True)):
            seconds, state = self.node_price(node, name, norm)
            edge = self.edge_s(at, name, names[at + 1] if at + 1 < len(names) else None, norm)
            if edge is None:
                return None
            time_s += seconds + edge
            bytes_ += state
        return Pattern(names, time_s, bytes_, norm)

    def enumerate(self, norms: tuple[str, ...] = ("replicate",)) -> tuple[int, list[Pattern]]:
        """(number of candidates, those that connect): a pattern for each node, one for the norms.

        Each node and each edge is priced once; what does not connect is dropped where it breaks.
        """
        if not self.nodes:  # a mixer only: nothing for these patterns to split
            return 0, []
        connected: list[Pattern] = []
        for norm in norms:
            connected += self._connected(norm)
        total = len(norms) * prod(len(REGISTRY[node.kind]) for node in self.nodes)
        return total, connected

    def _connected(self, norm: str) -> Iterator[Pattern]:
        last = len(self.nodes) - 1
        prices = [
            {name: self.node_price(node, name, norm) for name in node.legal} for node in self.nodes
        ]
        edges = [
            {
                (name, following): self.edge_s(at, name, following, norm)
                for name in node.legal
                for following in (self.nodes[at + 1].legal if at < last else (None,))
            }
            for at, node in enumerate(self.nodes)
        ]
        norm_s, norm_bytes = self.norm_price(norm)
        partial: list[tuple[tuple[str, ...], float, float]] = [
            ((name,), norm_s + self.first_s(name, norm) + seconds, norm_bytes + bytes_)
            for name, (seconds, bytes_) in prices[0].items()
        ]
        for at in range(last):
            partial = [
                ((*names, following), time_s + edge + seconds, held + bytes_)
                for names, time_s, held in partial
                for following, (seconds, bytes_) in prices[at + 1].items()
                if (edge := edges[at][names[-1], following]) is not None
            ]
        for names, time_s, held in partial:
            back = edges[last][names[-1], None]
            if back is not None:
                yield Pattern(names, time_s + back, held, norm)


def choices(patterns: list[Pattern]) -> tuple[Choice, ...]:
    """The Pareto set of patterns as choices of the stage problem, named by the pattern."""
    kept: list[Choice] = []
    for pattern in sorted(patterns, key=lambda p: (p.time_s, p.bytes)):
        if not kept or pattern.bytes < kept[-1].state_bytes:
            strategy = Strategy(pattern.name, "pattern")
            kept.append(Choice(pattern.time_s, pattern.bytes, 0.0, 0.0, 0.0, strategy))
    return tuple(kept)


def vocabulary(cost: AnalyticCostModel, degrees: Degrees) -> tuple[int, list[Choice]]:
    """(number of candidates, those that connect) for the pair of embedding and head.

    An embedding and a head that share their weight are sharded alike. The choice's strategy names
    the embedding's pattern (as `attention`) and the head's (as `mlp`).
    """
    graph = cost.graph
    if not graph.vocab_size:
        return 0, []
    kinds = tuple(REGISTRY["vocabulary"]) if degrees.tp > 1 else ("replicate",)
    connected = []
    for first, last in itertools.product(kinds, repeat=2):
        if graph.tied and first != last:
            continue
        ends = (cost.embedding(degrees, first, False), cost.head(degrees, last, False))
        connected.append(
            Choice(
                sum(end.forward_s + end.backward_s for end in ends),
                sum(end.state_bytes for end in ends),
                sum(end.activation_bytes for end in ends),
                max(end.workspace_bytes for end in ends),
                strategy=Strategy(first, last),
            )
        )
    return len(kinds) ** 2, connected


def fold(cost: AnalyticCostModel, degrees: Degrees) -> Folding:
    """Fold a model: enumerate the patterns of each distinct block once and keep the Pareto sets."""
    norms = tuple(REGISTRY["norm"]) if degrees.tp > 1 else ("replicate",)
    candidates = rejected = 0
    kept: list[Pattern] = []
    for block in cost.graph.classes:
        total, connected = BlockPatterns(cost, block, degrees).enumerate(norms)
        candidates += total
        rejected += total - len(connected)
        best = {choice.strategy.attention for choice in choices(connected)}
        kept += [pattern for pattern in connected if pattern.name in best]
    frontier = pareto(vocabulary(cost, degrees)[1])
    operators = sum(len(cost.graph.classes[layer].operators) for layer in cost.graph.layers)
    return Folding(
        operators,
        len(cost.graph.classes),
        candidates,
        rejected,
        tuple(kept),
        tuple((choice.strategy.attention, choice.strategy.mlp) for choice in frontier),
    )

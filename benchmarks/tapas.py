"""`python -m benchmarks.tapas`: what folding repeated blocks saves.

One Llama-2-7B block, repeated 12 to 192 times, sharded over tp 8 under a memory limit that forces a
mix of patterns. Three ways to the same optimum:

- folded: enumerate the patterns of the one distinct block, keep the Pareto set, solve for counts;
- unfolded: enumerate every layer's patterns and solve one ILP with a binary per layer and pattern;
- Alpa-type: one ILP over the operator graph, a binary per node and pattern, a continuous variable
  per edge and pair of patterns (re-layouts), one memory row.

Search times are CPU-seconds. Also: the block's best pattern on fast and on slow links, and counts
of operators, distinct blocks, candidates, rejected and kept patterns for other architectures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pulp

from benchmarks.common import arguments, show
from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.model import bundled_models, load_graph
from ds_autoplan.search.ilp import run_highs
from ds_autoplan.search.mix import Mixer, Room
from ds_autoplan.search.patterns import PATTERNS, BlockPatterns, choices, fold
from ds_autoplan.strategy import Degrees
from ds_autoplan.workload import Workload

DEPTHS = (12, 24, 48, 96, 192)
ILP_DEPTHS = (12, 24, 48)
REPEAT_S = 0.5
TIME_LIMIT_S = 120.0
DEGREES = Degrees(tp=8, micro_batch_size=1, num_micro_batches=8)
# Where the limit lies between the leanest and the fastest assignment: a mix is needed.
TIGHTNESS = 0.43


class Case:
    """A depth: its cost model, one block's patterns, and the memory limit."""

    def __init__(self, layers: int, nvlink: float = 1.0, model: str = "llama-2-7b") -> None:
        """`nvlink` scales the bandwidth inside the node."""
        config = {**bundled_models()[model], "num_hidden_layers": layers}
        place = parse_cluster("1x8xA100-SXM-80GB")
        inside = place.levels[0]
        slower = replace(
            inside,
            bytes_per_s=inside.bytes_per_s * nvlink,
            all_reduce_bytes_per_s=inside.all_reduce_bytes_per_s * nvlink,
        )
        place = replace(place, levels=(slower, *place.levels[1:]))
        self.layers = layers
        self.cost = AnalyticCostModel(load_graph(config), place, Workload(2048, 8))
        self.limit = self._limit()

    def block(self) -> BlockPatterns:
        """A block to enumerate (nothing is kept between calls)."""
        return BlockPatterns(self.cost, self.cost.graph.classes[0], DEGREES)

    def _limit(self) -> float:
        kept = choices(self.block().enumerate()[1])
        least = min(choice.state_bytes for choice in kept)
        most = kept[0].state_bytes
        return self.layers * (least + TIGHTNESS * (most - least))


def folded(case: Case) -> float | None:
    """The optimum by folding."""
    kept = choices(case.block().enumerate()[1])
    mix = Mixer((kept,)).fastest((case.layers,), Room(1.0, case.limit, 0.0))
    return mix.time_s if mix else None


def _optimum(model: Any, scale: float) -> float | None:
    solver = pulp.HiGHS(msg=False, gapRel=1e-9, threads=1, timeLimit=TIME_LIMIT_S)
    status = run_highs(model, solver)
    return float(pulp.value(model.objective)) * scale if status == "optimal" else None


def unfolded(case: Case) -> float | None:
    """The optimum by one binary per layer and pattern."""
    per_layer = [choices(case.block().enumerate()[1]) for _ in range(case.layers)]
    scale = per_layer[0][0].time_s
    model = pulp.LpProblem("unfolded", pulp.LpMinimize)
    time_terms, memory = [], []
    for layer, kept in enumerate(per_layer):
        binaries = [model.add_variable(f"z_{layer}_{k}", cat="Binary") for k in range(len(kept))]
        model += pulp.lpSum(binaries) == 1
        for choice, binary in zip(kept, binaries, strict=True):
            time_terms.append(choice.time_s / scale * binary)
            memory.append(choice.state_bytes / case.limit * binary)
    model += pulp.lpSum(time_terms)
    model += pulp.lpSum(memory) <= 1
    return _optimum(model, scale)


def alpa(case: Case) -> float | None:
    """The optimum by one ILP over the operator graph with node and edge variables."""
    block = case.block()
    scale = sum(block.node_price(node, "column")[0] for node in block.nodes)
    model = pulp.LpProblem("operators", pulp.LpMinimize)
    terms: list[Any] = []
    memory: list[Any] = []
    for layer in range(case.layers):
        here = block if layer == 0 else case.block()  # every layer is priced anew
        norm_s, norm_bytes = here.norm_price("replicate")
        terms.append(norm_s / scale)
        memory.append(norm_bytes / case.limit)
        nodes = []
        for at, node in enumerate(here.nodes):
            binaries = {
                name: model.add_variable(f"n_{layer}_{at}_{name}", cat="Binary")
                for name in node.legal
            }
            nodes.append(binaries)
            model += pulp.lpSum(binaries.values()) == 1
            for name, binary in binaries.items():
                seconds, state = here.node_price(node, name)
                first = here.first_s(name) if at == 0 else 0.0
                terms.append((seconds + first) / scale * binary)
                memory.append(state / case.limit * binary)
        for at, binaries in enumerate(nodes):
            _edges(model, here, terms, scale, (layer, at), binaries, nodes)
    model += pulp.lpSum(terms)
    model += pulp.lpSum(memory) <= 1
    return _optimum(model, scale)


def _edges(
    model: Any,
    block: BlockPatterns,
    terms: list[Any],
    scale: float,
    place: tuple[int, int],
    binaries: dict[str, Any],
    nodes: list[dict[str, Any]],
) -> None:
    """Edge variables from one node to the next, or the last node's way back to the stream."""
    layer, at = place
    if at + 1 == len(nodes):
        for name, binary in binaries.items():
            seconds = block.edge_s(at, name, None)
            if seconds is None:
                model += binary == 0
            else:
                terms.append(seconds / scale * binary)
        return
    into: dict[str, list[Any]] = {name: [] for name in nodes[at + 1]}
    for name, binary in binaries.items():
        out = []
        for following in nodes[at + 1]:
            seconds = block.edge_s(at, name, following)
            if seconds is None:
                continue
            edge = model.add_variable(f"e_{layer}_{at}_{name}_{following}", 0, 1)
            terms.append(seconds / scale * edge)
            out.append(edge)
            into[following].append(edge)
        model += pulp.lpSum(out) == binary
    for name, edges in into.items():
        model += pulp.lpSum(edges) == nodes[at + 1][name]


def timed(solve: Callable[[Case], float | None], case: Case) -> tuple[float, float | None]:
    """(CPU seconds, optimum); repeated for half a second, and the least is taken."""
    best, total, value = float("inf"), 0.0, None
    while total < REPEAT_S:
        started = time.process_time()
        value = solve(case)
        took = time.process_time() - started
        best, total = min(best, took), total + took
    return best, value


def depth_rows() -> list[dict[str, Any]]:
    """Search time and optimum by depth."""
    rows = []
    for depth in DEPTHS:
        case = Case(depth)
        row: dict[str, Any] = {"layers": depth}
        row["folded_s"], row["folded_optimum"] = timed(folded, case)
        if depth in ILP_DEPTHS:
            for name, solve in (("unfolded", unfolded), ("alpa", alpa)):
                row[f"{name}_s"], row[f"{name}_optimum"] = timed(solve, case)
        rows.append(row)
    return rows


def best_pattern(nvlink: float) -> str:
    """The fastest pattern of one block when links run at `nvlink` times their speed."""
    found = Case(1, nvlink).block().enumerate()[1]
    fastest = min(found, key=lambda pattern: pattern.time_s)
    return " ".join(fastest.names)


def counts() -> list[dict[str, Any]]:
    """The folding report of other architectures."""
    rows = []
    place = parse_cluster("1x8xA100-SXM-80GB")
    for model in ("llama-2-7b", "gpt3-175b", "gemma-2-9b", "bert-huge", "t5-large", "vit-huge"):
        graph = load_graph(model)
        cost = AnalyticCostModel(graph, place, Workload(512 if model != "vit-huge" else 197, 8))
        found = fold(cost, replace(DEGREES, tp=4))
        rows.append(
            {
                "model": model,
                "layers": graph.num_layers,
                "operators": found.operators,
                "distinct_blocks": found.distinct_blocks,
                "candidates": found.candidates,
                "rejected": found.rejected,
                "kept": len(found.kept),
            }
        )
    return rows


def main() -> None:
    """Print times, patterns and counts."""
    args = arguments("Folding against unfolded and operator-level programs.").parse_args()
    rows = depth_rows()
    at_48 = next(row for row in rows if row["layers"] == 48)
    answer = {
        "rows": rows,
        "growth_12_to_192": rows[-1]["folded_s"] / rows[0]["folded_s"],
        "alpa_over_folded_at_48": at_48["alpa_s"] / at_48["folded_s"],
        "fast_links": best_pattern(1.0),
        "slow_links": {f"{scale:g}x": best_pattern(scale) for scale in (0.1, 0.05, 0.03)},
        "patterns": list(PATTERNS),
        "counts": counts(),
    }
    columns = ["layers", "folded_s", "unfolded_s", "alpa_s"]
    columns += ["folded_optimum", "unfolded_optimum", "alpa_optimum"]
    show(answer, columns, "rows", args.json)


if __name__ == "__main__":
    main()

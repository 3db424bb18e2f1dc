"""`python -m benchmarks.uniap`: what deciding stages and strategies together gains.

Five Transformers and Llama-13B on three small testbeds (8 V100-32GB; 2 nodes of 4 TITAN Xp-12GB
on 10 Gb/s; 8 A100-40GB on PCIe). For each: the joint optimum, inter-layer only (pp and dp), intra-
layer only (no pipeline), two-phase (even stages, one strategy for all, best candidate), and the
constructive heuristic over all candidates; HiGHS's own bound on the winner's ILP; search seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks.common import arguments, show
from ds_autoplan.api import capacity_bytes, plan
from ds_autoplan.cluster import Topology, parse_cluster
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.errors import InfeasibleError
from ds_autoplan.model import BlockGraph, load_graph
from ds_autoplan.search.heuristic import construct
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.search.pricing import Pricer
from ds_autoplan.search.problem import Choice, Problem, evaluate
from ds_autoplan.search.space import enumerate_space
from ds_autoplan.workload import Workload

# Sequence lengths and depths as the method's authors used them; batches are ours.
MODELS = [
    ("bert-huge", 512, 64),
    ("t5-large", 512, 64),
    ("vit-huge", 197, 128),
    ("swin-huge", 3136, 128),
    ("llama-7b", 2048, 16),
    ("llama-13b", 2048, 16),
]
PROOF_LIMIT_S = 20.0  # HiGHS's own status says where that was not enough


def testbeds() -> list[tuple[str, Topology, str]]:
    """(name, topology, precision) of the three testbeds."""
    a100 = parse_cluster("1x8xA100-PCIe-80GB")
    small = replace(a100.device, name="A100-PCIe-40GB", memory_bytes=40 * 2**30)
    return [
        ("8 V100-32GB", parse_cluster("1x8xV100-SXM2-32GB"), "fp16"),
        ("2x4 TITAN Xp-12GB, 10 Gb/s", parse_cluster("2x4xTITAN-Xp,nic=10Gb"), "fp32"),
        ("8 A100-40GB PCIe", replace(a100, device=small, name="1x8xA100-PCIe-40GB"), "bf16"),
    ]


class Job:
    """One model on one testbed."""

    def __init__(self, graph: BlockGraph, place: Topology, workload: Workload) -> None:
        """Enumerate the candidates once."""
        self.graph, self.place, self.workload = graph, place, workload
        options = PlanOptions(pins={"vpp": 1})
        cost = AnalyticCostModel(graph, place, workload)
        self.pricer = Pricer(graph, cost, workload, options, capacity_bytes(cost, options))
        self.candidates = enumerate_space(graph, place.num_devices, workload, options).candidates

    def solved(self, ablation: str = "", prove: bool = False) -> Any:
        """The plan under an ablation, or None where nothing fits."""
        limit = PROOF_LIMIT_S if prove else None
        options = PlanOptions(
            pins={"vpp": 1}, ablation=ablation, prove=prove, top_k=0, time_limit_s=limit
        )
        try:
            return plan(self.graph, self.place, self.workload, options)
        except InfeasibleError:
            return None

    def best(self, **rules: Callable[[Problem], float | None]) -> dict[str, float | None]:
        """For each rule the best step time that it gives over all candidates that may fit."""
        found: dict[str, float | None] = dict.fromkeys(rules)
        for candidate in self.candidates:
            if self.pricer.missing_bytes(candidate) > 0:
                continue
            problem = self.pricer.problem(candidate)
            for name, rule in rules.items():
                value, best = rule(problem), found[name]
                if value is not None and (best is None or value < best):
                    found[name] = value
        return found


def two_phase(problem: Problem) -> float | None:
    """Even stages and the same strategy for every layer."""
    count, layers = len(problem.stages), len(problem.layers)
    bounds = tuple(round(stage * layers / count) for stage in range(count + 1))
    best = None
    for strategy in {choice.strategy for choices in problem.choices for choice in choices}:
        per_class: list[Choice] = []
        for choices in problem.choices:
            per_class += [choice for choice in choices if choice.strategy == strategy][:1]
        if len(per_class) < len(problem.choices):
            continue
        value = evaluate(problem, bounds, tuple(per_class[klass] for klass in problem.layers))
        if value is not None and (best is None or value < best):
            best = value
    return best


def heuristic(problem: Problem) -> float | None:
    """What the constructive heuristic gives."""
    found = construct(problem)
    return found.objective_s if found else None


def compare(job: Job) -> dict[str, Any]:
    """One row."""
    started = time.process_time()
    joint = job.solved()
    seconds = time.process_time() - started
    if joint is None:
        return {"plan": "does not fit", "search_cpu_s": seconds}
    proof = job.solved(prove=True).report["proof"]
    row: dict[str, Any] = {
        "plan": f"tp{joint.degrees.tp} pp{joint.degrees.pp} dp{joint.degrees.dp}",
        "joint_s": joint.step_s,
        "search_cpu_s": seconds,
        "highs": proof["status"],
        "highs_bound": proof["bound_s"] / joint.solver.objective_s,
    }
    for name in ("inter", "intra"):
        other = job.solved(name)
        row[name] = other.step_s / joint.step_s if other else None
    for name, value in job.best(two_phase=two_phase, heuristic=heuristic).items():
        row[name] = value / joint.step_s if value else None
    return row


def run() -> list[dict[str, Any]]:
    """All rows; times of other methods as multiples of the joint optimum's."""
    rows = []
    for name, place, precision in testbeds():
        for model, seq, batch in MODELS:
            workload = Workload(seq, batch, precision=precision, backend="megatron")
            job = Job(load_graph(model), place, workload)
            rows.append({"testbed": name, "model": model, **compare(job)})
    return rows


def main() -> None:
    """Print the comparison."""
    args = arguments("Joint against separate decisions.").parse_args()
    rows = run()
    largest: dict[str, float] = {
        name: max((row[name] for row in rows if row.get(name)), default=1.0)
        for name in ("inter", "intra", "two_phase", "heuristic")
    }
    columns = ["testbed", "model", "plan", "joint_s", "inter", "intra", "two_phase", "heuristic"]
    columns += ["highs", "highs_bound", "search_cpu_s"]
    show({"rows": rows, "largest_gain": largest}, columns, "rows", args.json)


if __name__ == "__main__":
    main()

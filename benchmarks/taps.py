"""`python -m benchmarks.taps`: what pricing traffic in seconds gains over pricing it by volume.

Intra-operator plans only (no pipeline): every tp x dp that fills the cluster, each with tp inside
the nodes and with tp across them. For 1, 2, 4, 8 nodes of 8 devices and node-to-network bandwidth
ratios of 1 to 30 the plan of least volume and the plan of least communication time are found, and
the communication time of both is compared. Plans of equal volume are indistinguishable to the
volume model: the reduction is given against the best and the worst of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.common import arguments, show
from ds_autoplan.cluster import Topology, parse_cluster
from ds_autoplan.cost.interface import StageAssignment
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.model import BlockGraph, load_graph
from ds_autoplan.search.space import divisors, shardable
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload

NODES = (1, 2, 4, 8)
RATIOS = (1, 2, 3, 5, 10, 20, 30)
ORDERS = ("tp-cp-ep-dp-pp", "dp-cp-ep-tp-pp")
SAMPLES_PER_DEVICE = 16  # per step; one at a time


def topology(nodes: int, ratio: float) -> Topology:
    """Nodes of 8 A100; the network's bandwidth per device is the node's divided by `ratio`."""
    made = parse_cluster(f"{nodes}x8xA100-SXM-80GB")
    inside = made.levels[0]
    if nodes == 1:
        return made
    network = replace(made.levels[-1], bytes_per_s=inside.bytes_per_s / ratio)
    return replace(made, levels=(inside, network))


def plans(graph: BlockGraph, world: int, batch: int) -> Iterator[Degrees]:
    """Every legal (tp, dp), tp innermost and dp innermost."""
    for tp in divisors(world):
        dp = world // tp
        if batch % dp or not all(shardable(graph.classes[0], tp)):
            continue
        for order in ORDERS if tp > 1 and dp > 1 else ORDERS[:1]:
            # a micro-batch is one sample of each of the replica's ranks
            yield Degrees(
                tp=tp,
                dp=dp,
                micro_batch_size=tp,
                num_micro_batches=SAMPLES_PER_DEVICE,
                zero_stage=1,
                order=order,
            )


def traffic_s(cost: AnalyticCostModel, degrees: Degrees) -> float:
    """Communication seconds of a step under a cost model."""
    strategy = Strategy(sequence_parallel=degrees.tp > 1)
    layers = cost.graph.num_layers
    stage = StageAssignment(tuple(range(layers)), (strategy,) * layers)
    parts = cost.step(degrees, (stage,), "shard").breakdown_s
    return parts["tp"] + parts["dp"]


def sweep(model: str = "llama-2-7b", seq_length: int = 2048) -> list[dict[str, Any]]:
    """One row for each number of nodes and bandwidth ratio."""
    graph = load_graph(model)
    rows = []
    for nodes in NODES:
        for ratio in RATIOS:
            place = topology(nodes, ratio)
            batch = place.num_devices * SAMPLES_PER_DEVICE
            workload = Workload(seq_length, batch)
            by_time = AnalyticCostModel(graph, place, workload)
            by_volume = AnalyticCostModel(graph, place, workload, volume_only=True)
            found = [
                (traffic_s(by_volume, d), traffic_s(by_time, d), d)
                for d in plans(graph, place.num_devices, batch)
                if d.tp > 1  # pure dp has no choice of placement
            ]
            least = min(item[0] for item in found)
            alike = [item for item in found if item[0] <= least * (1 + 1e-9)]
            fast = min(found, key=lambda item: item[1])
            worst = max(item[1] for item in alike)
            best = min(item[1] for item in alike)
            rows.append(
                {
                    "nodes": nodes,
                    "ratio": ratio,
                    "volume_plan": _text(alike[0][2]),
                    "time_plan": _text(fast[2]),
                    "volume_plan_s": worst,
                    "volume_plan_best_tie_s": best,
                    "time_plan_s": fast[1],
                    "reduction": 1 - fast[1] / worst,
                    "reduction_best_tie": 1 - fast[1] / best,
                }
            )
    return rows


def _text(degrees: Degrees) -> str:
    inner = degrees.order.split("-")[0]
    return f"tp{degrees.tp} dp{degrees.dp} {inner} inside"


def main() -> None:
    """Print the sweep."""
    args = arguments("Volume-optimal against time-optimal plans.").parse_args()
    rows = sweep()
    largest = max(rows, key=lambda row: row["reduction"])
    answer = {
        "rows": rows,
        "largest_reduction": largest["reduction"],
        "at": {"nodes": largest["nodes"], "ratio": largest["ratio"]},
        "one_node": max(row["reduction"] for row in rows if row["nodes"] == 1),
    }
    columns = ["nodes", "ratio", "volume_plan", "time_plan", "volume_plan_s", "time_plan_s"]
    show(answer, [*columns, "reduction", "reduction_best_tie"], "rows", args.json)


if __name__ == "__main__":
    main()

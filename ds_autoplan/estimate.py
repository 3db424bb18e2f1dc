"""`ds-autoplan estimate`: the price of one setting whose every degree is given."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ds_autoplan.cluster.topology import Topology
from ds_autoplan.cost.interface import StageAssignment, StepEstimate
from ds_autoplan.cost.model import MEMORY_KEYS, AnalyticCostModel
from ds_autoplan.errors import InfeasibleError
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.search.space import enumerate_space
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload


def even_cut(layers: int, pp: int, strategy: Strategy) -> tuple[StageAssignment, ...]:
    """Cut `layers` as evenly as possible; middle stages take the remainder, as the ends carry more.

    Raises:
        InfeasibleError: fewer layers than stages.
    """
    base, rest = divmod(layers, pp)
    if base == 0:
        raise InfeasibleError(
            f"{layers} layers cannot be cut into {pp} stages.",
            "Every stage needs at least one layer.",
            f"Use pp <= {layers}.",
        )
    counts = [base] * pp
    order = sorted(range(pp), key=lambda stage: (stage in (0, pp - 1), stage == 0, stage))
    for stage in order[:rest]:
        counts[stage] += 1
    stages, first = [], 0
    for count in counts:
        stages.append(StageAssignment(tuple(range(first, first + count)), (strategy,) * count))
        first += count
    return tuple(stages)


def estimate(
    graph: BlockGraph,
    topology: Topology,
    workload: Workload,
    degrees: Degrees,
    strategy: Strategy,
    vocabulary: str = "shard",
) -> StepEstimate:
    """Price `degrees` with the same `strategy` for every layer and an even cut.

    Raises:
        InfeasibleError: the degrees do not fill the cluster, or the batch does not divide.
    """
    if degrees.world_size != topology.num_devices:
        raise InfeasibleError(
            f"tp {degrees.tp} x cp {degrees.cp} x dp {degrees.dp} x pp {degrees.pp} is "
            f"{degrees.world_size} ranks, the cluster has {topology.num_devices} devices.",
            "The degrees must multiply to the number of devices.",
            "Change a degree or the cluster.",
        )
    samples = degrees.dp * degrees.micro_batch_size * degrees.num_micro_batches
    if samples != workload.global_batch_size:
        raise InfeasibleError(
            f"dp {degrees.dp} x micro-batch {degrees.micro_batch_size} does not divide the global "
            f"batch of {workload.global_batch_size}.",
            "global_batch_size = dp * micro_batch_size * num_micro_batches.",
            "Choose a micro-batch size or dp that divides it.",
        )
    model = AnalyticCostModel(graph, topology, workload)
    return model.step(degrees, even_cut(graph.num_layers, degrees.pp, strategy), vocabulary)


def exclusions(
    graph: BlockGraph, workload: Workload, degrees: Degrees, strategy: Strategy
) -> tuple[str, ...]:
    """Why the planner would not consider this setting on this backend; empty where it would."""
    pins: dict[str, Any] = {item.name: getattr(degrees, item.name) for item in fields(degrees)}
    del pins["num_micro_batches"]
    pins["sequence_parallel"] = strategy.sequence_parallel
    space = enumerate_space(graph, degrees.world_size, workload, PlanOptions(pins=pins))
    return () if space.candidates else tuple(space.reasons({k: (v,) for k, v in pins.items()}))


def estimate_json(
    priced: StepEstimate, workload: Workload, num_devices: int, capacity_bytes: float
) -> dict[str, Any]:
    """What `estimate --json` prints."""
    tokens = workload.seq_length * workload.global_batch_size
    margins = [round(capacity_bytes - stage.peak_bytes) for stage in priced.stages]
    return {
        "fits": min(margins) >= 0,
        "capacity_bytes": round(capacity_bytes),
        "margin_bytes": margins,
        "step_s": priced.step_s,
        "range_s": list(priced.range_s),
        "tokens_per_s_per_gpu": tokens / priced.step_s / num_devices,
        "peak_bytes": [stage.peak_bytes for stage in priced.stages],
        "breakdown_s": dict(priced.breakdown_s),
        "memory": [{key: stage.memory[key] for key in MEMORY_KEYS} for stage in priced.stages],
        "uncalibrated_fraction": priced.uncalibrated_fraction,
        "assumptions": list(priced.assumptions),
    }

"""Planning as a function: (model, cluster, workload, options) -> Plan. Pure; no torch, no GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_autoplan.errors import BadInputError, InfeasibleError
from ds_autoplan.inputs import Inputs, record
from ds_autoplan.model.flops import model_flops
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.model.load import graph_of_config, read_config
from ds_autoplan.plan import LayerPlan, Plan, SolverReport, StagePlan
from ds_autoplan.reading import count, number
from ds_autoplan.search.options import DEFAULT_RESERVE, PlanOptions
from ds_autoplan.search.pricing import Pricer
from ds_autoplan.search.solve import Outcome, Progress, Solved, search
from ds_autoplan.search.space import Space, enumerate_space, stage_order
from ds_autoplan.workload import BACKENDS, PRECISIONS, Workload

if TYPE_CHECKING:
    from ds_autoplan.cluster import Topology
    from ds_autoplan.cost.interface import CostModel, StepEstimate

GB = 1e9
Model = BlockGraph | Mapping[str, Any] | str | Path


def plan(
    model: Model,
    cluster: Topology | str,
    workload: Workload,
    options: PlanOptions | None = None,
    cost: CostModel | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan that fits.

    Args:
        model: a block graph, a Hugging Face config dict, a config.json, a folder, or a bundled
        name.
        cluster: a topology, or its spec ("4x8xH100-SXM-80GB", a cluster file).
        workload: batch, sequence, precision, optimizer, backend.
        options: pins and limits; by default everything is free.
        cost: a cost model for (graph, topology, workload); by default the analytic one.
        progress: called with (candidates done, all, best step time so far).

    Raises:
        BadInputError: an input cannot be taken as it is.
        UnsupportedError: the model or the combination is not supported.
        InfeasibleError: no candidate fits or is allowed.
    """
    options = options or PlanOptions()
    config = None
    if isinstance(model, BlockGraph):
        graph = model
    else:
        config, name = read_config(model)
        graph = graph_of_config(config, name)
    inputs = Inputs(graph, _topology(cluster), workload, options)
    try:
        made = plan_without_help(inputs, cost, progress)
    except InfeasibleError as error:
        if cost is None:
            raise _with_ways_out(error, inputs) from None
        raise
    return replace(made, report={**made.report, "inputs": record(inputs, config)})


def plan_without_help(
    inputs: Inputs, cost: CostModel | None = None, progress: Progress | None = None
) -> Plan:
    """As :func:`plan`, but where nothing fits the error names no relaxations.

    Raises:
        BadInputError: an input cannot be taken as it is.
        InfeasibleError: no candidate fits or is allowed.
    """
    graph, workload, options = inputs.graph, inputs.workload, inputs.options
    check_workload(graph, workload)
    if cost is None:
        cost = _cost_model(graph, inputs.topology, workload, options)
    devices = inputs.topology.num_devices
    space = enumerate_space(graph, devices, workload, options)
    if not space.candidates:
        raise InfeasibleError(
            f"No combination of degrees is allowed on {devices} devices:",
            "; ".join(space.reasons(options.pins)) + ".",
            "Relax the pins, or change the batch size or the number of devices.",
        )
    capacity = capacity_bytes(cost, options)
    pricer = Pricer(graph, cost, workload, options, capacity)
    outcome = search(pricer, space.candidates, options.top_k, options.time_limit_s, progress)
    if not outcome.solved:
        raise _nothing_fits(graph, outcome, capacity)
    return _assemble(inputs, cost, pricer, space, outcome)


def _with_ways_out(error: InfeasibleError, inputs: Inputs) -> InfeasibleError:
    """The same error with the smallest changes that would make it fit, as text and as data."""
    from ds_autoplan.relax import relaxations

    ways = relaxations(inputs)
    if not ways:
        return error
    listed = "; ".join(f"{way['text']}: {way['step_s']:.4g} s a step" for way in ways)
    helped = InfeasibleError(error.value, error.rule, f"What would fit: {listed}.")
    helped.details = {"relaxations": ways}
    return helped


def check_workload(graph: BlockGraph, workload: Workload) -> None:
    """Refuse a workload that no model, or not this model, can train.

    Raises:
        BadInputError: a size is not positive, a name unknown, or the sequence too long.
    """
    for name in ("seq_length", "global_batch_size"):
        count(getattr(workload, name), name)
    number(workload.gradient_clipping, "gradient_clipping", zero=True)
    for name, allowed in (("precision", PRECISIONS), ("backend", BACKENDS)):
        value = getattr(workload, name)
        if value not in allowed:
            raise BadInputError(f"{name} is {value!r}.", f"It must be one of {', '.join(allowed)}.")
    calls = workload.gradient_accumulation_steps
    if calls is not None and workload.backend == "megatron":
        raise BadInputError(
            f"gradient_accumulation_steps is {calls} under the megatron backend.",
            "It counts a script's engine calls per step, which Megatron does not have.",
            "Leave it out: the micro-batches of a step follow from the batch sizes.",
        )
    learned = any(o.role == "position" and o.kind == "embedding" for o in graph.embedding)
    if learned and graph.vocab_size and workload.seq_length > graph.max_position > 0:
        raise BadInputError(
            f"The sequence length is {workload.seq_length}, but {graph.name} has "
            f"{graph.max_position} learned positions.",
            "A learned position embedding cannot be longer than trained.",
            "Use a shorter sequence, or a config with more positions.",
        )


def capacity_bytes(cost: CostModel, options: PlanOptions) -> float:
    """Memory that a plan may use on each device: what the device has, less the reserve."""
    total = cost.capacity_bytes()
    reserve = options.memory_reserve_gb
    left = total * (1 - DEFAULT_RESERVE) if reserve is None else total - reserve * GB
    if left <= 0:
        raise BadInputError(
            f"memory_reserve_gb is {reserve}, but a device has {total / GB:.1f} GB.",
            "The reserve must leave something to train with.",
        )
    return left


def _topology(cluster: Topology | str) -> Topology:
    if isinstance(cluster, str):
        from ds_autoplan.cluster import parse_cluster

        return parse_cluster(cluster)
    return cluster


def _cost_model(
    graph: BlockGraph, topology: Topology, workload: Workload, options: PlanOptions
) -> CostModel:
    from ds_autoplan.cost.model import AnalyticCostModel

    return AnalyticCostModel(graph, topology, workload, volume_only=options.cost == "volume")


def _assemble(
    inputs: Inputs, cost: CostModel, pricer: Pricer, space: Space, outcome: Outcome
) -> Plan:
    graph, topology = inputs.graph, inputs.topology
    workload, options = inputs.workload, inputs.options
    winner = outcome.solved[0]
    judge = cost
    if options.cost == "volume":
        judge = _cost_model(graph, topology, workload, PlanOptions())
    estimate = recost(graph, judge, winner)
    reference = heads(graph, workload, topology, judge, winner, estimate)
    alternatives = []
    for other in outcome.solved[1 : options.top_k + 1]:
        priced = recost(graph, judge, other)
        alternatives.append(
            {
                **heads(graph, workload, topology, judge, other, priced),
                "why": _why(estimate, priced),
            }
        )
    solution = winner.solution
    facts: dict[str, Any] = {
        "parameters": graph.num_parameters,
        "block_classes": len(graph.classes),
        "range_s": list(estimate.range_s),
        **_folding(graph, judge, winner),
    }
    if options.prove:
        facts["proof"] = _proof(winner, options)
    return Plan(
        model=graph.name,
        degrees=winner.candidate.degrees,
        seq_length=workload.seq_length,
        global_batch_size=workload.global_batch_size,
        precision=workload.precision,
        backend=workload.backend,
        vocabulary=winner.candidate.vocabulary,
        stages=_stage_plans(winner, estimate, pricer.capacity_bytes),
        layers=_layer_plans(graph, winner),
        step_s=reference["step_s"],
        tokens_per_s=reference["tokens_per_s"],
        tokens_per_s_per_gpu=reference["tokens_per_s_per_gpu"],
        mfu=reference["mfu"],
        uncalibrated_fraction=estimate.uncalibrated_fraction,
        breakdown_s=dict(estimate.breakdown_s),
        solver=SolverReport(
            status="time limit" if outcome.stopped else solution.status,
            objective_s=solution.objective_s,
            bound_s=outcome.bound_s,
            gap=max(0.0, 1 - outcome.bound_s / solution.objective_s),
            seconds=outcome.seconds,
            candidates=outcome.candidates,
            solved=outcome.tried,
            pruned=outcome.pruned,
        ),
        cluster=topology.describe(),
        assumptions=_assumptions(graph, workload, topology, options, cost, estimate),
        alternatives=tuple(alternatives),
        excluded=tuple(_excluded(space, outcome)),
        report=facts,
    )


def _folding(graph: BlockGraph, cost: CostModel, winner: Solved) -> dict[str, Any]:
    """What folding saved, and the sharding patterns of the distinct blocks at the winner's tp."""
    from ds_autoplan.cost.model import AnalyticCostModel
    from ds_autoplan.search.patterns import fold

    if not isinstance(cost, AnalyticCostModel):
        return {}
    folding = fold(cost, winner.candidate.degrees)
    counts = {
        "modules": graph.num_modules or None,
        "operators": folding.operators,
        "blocks": graph.num_layers,
        "distinct_blocks": folding.distinct_blocks,
        "candidates": folding.candidates,
        "rejected": folding.rejected,
        "kept": len(folding.kept),
        "patterns": [pattern.name for pattern in folding.kept],
        "vocabulary": [f"embedding {first}, head {last}" for first, last in folding.vocabulary],
    }
    return {"folding": counts}


def _proof(winner: Solved, options: PlanOptions) -> dict[str, Any]:
    """The winner's stage problem as one ILP, solved by HiGHS: its own status, bound and gap."""
    from ds_autoplan.search.ilp import solve_folded

    degrees = winner.candidate.degrees
    bounds = winner.solution.bounds if degrees.vpp > 1 else None  # interleaved: the cut is given
    started = time.monotonic()
    answer = solve_folded(winner.problem, options.time_limit_s, bounds)
    return {
        "solver": "HiGHS",
        "status": answer.status,
        "objective_s": answer.solution.objective_s if answer.solution else None,
        "bound_s": answer.bound_s,
        "gap": answer.gap,
        "seconds": time.monotonic() - started,
        "agrees": abs(answer.bound_s - winner.solution.objective_s)
        <= 1e-6 * winner.solution.objective_s,
    }


def recost(graph: BlockGraph, cost: CostModel, solved: Solved) -> StepEstimate:
    """The cost model's own price of a solution: nothing is believed before it."""
    from ds_autoplan.cost.interface import StageAssignment

    bounds, chosen = solved.solution.bounds, solved.solution.chosen
    order = stage_order(graph.num_layers, solved.candidate.degrees)
    stages = tuple(
        StageAssignment(order[first:end], tuple(choice.strategy for choice in chosen[first:end]))
        for first, end in zip(bounds, bounds[1:], strict=False)
    )
    return cost.step(solved.candidate.degrees, stages, solved.candidate.vocabulary)


def heads(
    graph: BlockGraph,
    workload: Workload,
    topology: Topology,
    cost: CostModel,
    solved: Solved,
    estimate: StepEstimate,
) -> dict[str, Any]:
    """The head keys of a plan: degrees, time, throughput, utilisation."""
    degrees = solved.candidate.degrees
    tokens = workload.seq_length * workload.global_batch_size
    flops = model_flops(graph, workload.seq_length) * workload.global_batch_size
    world = topology.num_devices
    return {
        **asdict(degrees),
        "sequence_parallel": solved.candidate.sequence_parallel,
        "step_s": estimate.step_s,
        "tokens_per_s": tokens / estimate.step_s,
        "tokens_per_s_per_gpu": tokens / estimate.step_s / world,
        "mfu": flops / (estimate.step_s * world * cost.peak_flops()),
        "peak_bytes": max(stage.peak_bytes for stage in estimate.stages),
    }


def _stage_plans(solved: Solved, estimate: StepEstimate, capacity: float) -> tuple[StagePlan, ...]:
    bounds = solved.solution.bounds
    return tuple(
        StagePlan(
            first_layer=first,
            last_layer=end - 1,
            time_s=stage.time_s,
            peak_bytes=stage.peak_bytes,
            memory=dict(stage.memory),
            margin_bytes=int(capacity - stage.peak_bytes),
        )
        for first, end, stage in zip(bounds, bounds[1:], estimate.stages, strict=False)
    )


def _layer_plans(graph: BlockGraph, solved: Solved) -> tuple[LayerPlan, ...]:
    degrees, bounds = solved.candidate.degrees, solved.solution.bounds
    names = graph.layer_names or ("",) * graph.num_layers
    order = stage_order(graph.num_layers, degrees)
    stages = [stage for stage, end in enumerate(bounds[1:]) for _ in range(bounds[stage], end)]
    layers = [
        LayerPlan(index, names[index], stage, choice.strategy)
        for index, stage, choice in zip(order, stages, solved.solution.chosen, strict=True)
    ]
    return tuple(sorted(layers, key=lambda layer: layer.index))


def _why(best: StepEstimate, other: StepEstimate) -> str:
    """In one sentence, what makes `other` slower: the parts of the step that grew most."""
    slower = other.step_s / best.step_s - 1
    if slower < 1e-9:
        return "as fast; more parallel or less simple"
    grown = sorted(
        (
            (other.breakdown_s.get(key, 0.0) - best.breakdown_s.get(key, 0.0), key)
            for key in {*best.breakdown_s, *other.breakdown_s}
        ),
        reverse=True,
    )
    parts = [
        f"{key} {other.breakdown_s.get(key, 0.0):.3g} s instead of "
        f"{best.breakdown_s.get(key, 0.0):.3g} s"
        for gain, key in grown[:2]
        if gain > 0.05 * (other.step_s - best.step_s)
    ]
    return f"{slower:.1%} slower: {', '.join(parts)}"


def _assumptions(
    graph: BlockGraph,
    workload: Workload,
    topology: Topology,
    options: PlanOptions,
    cost: CostModel,
    estimate: StepEstimate,
) -> tuple[str, ...]:
    total = cost.capacity_bytes()
    kept = total - capacity_bytes(cost, options)
    notes = [
        *estimate.assumptions,
        f"{kept / GB:.1f} of {total / GB:.1f} GB per device stay free",
        "mfu counts the model's own FLOPs (no recomputation), causal attention at half",
    ]
    if any(o.kind == "state_space" for block in graph.classes for o in block.operators):
        notes.append(
            "state-space and convolution mixers are priced by what they move, uncalibrated"
        )
    world = topology.num_devices
    if workload.backend == "deepspeed" and workload.global_batch_size % world:
        notes.append(
            f"a script that runs as plain data parallelism over {world} ranks needs a global batch "
            f"that is a multiple of {world}; {workload.global_batch_size} is not"
        )
    if workload.seq_length > graph.max_position > 0 and graph.vocab_size:
        notes.append(
            f"the sequence of {workload.seq_length} is longer than the model's "
            f"{graph.max_position} positions"
        )
    return tuple(notes)


def _excluded(space: Space, outcome: Outcome) -> list[dict[str, Any]]:
    excluded = space.exclusions()
    for candidate, missing in outcome.too_big:
        degrees = candidate.degrees
        excluded.append(
            {
                "candidate": {
                    **{key: getattr(degrees, key) for key in ("tp", "pp", "dp", "cp", "ep", "vpp")},
                    "zero_stage": degrees.zero_stage,
                    "micro_batch_size": degrees.micro_batch_size,
                    "sequence_parallel": candidate.sequence_parallel,
                },
                "reason": _too_big(missing),
            }
        )
    return excluded


def _too_big(missing: float) -> str:
    if missing <= 0:
        return "does not fit in memory under any mix of strategies"
    return f"does not fit in memory: {missing / GB:.1f} GB per device too many, at least"


def _nothing_fits(graph: BlockGraph, outcome: Outcome, capacity: float) -> InfeasibleError:
    nearest = min(outcome.too_big, key=lambda item: (item[1], item[0].simplicity))
    degrees = nearest[0].degrees
    return InfeasibleError(
        f"No plan for {graph.name} fits in {capacity / GB:.1f} GB per device.",
        f"The nearest (tp={degrees.tp}, pp={degrees.pp}, dp={degrees.dp}, "
        f"zero_stage={degrees.zero_stage}, micro_batch_size={degrees.micro_batch_size}) "
        f"{_too_big(nearest[1])}.",
        "Use more devices, a shorter sequence, or relax the pins.",
    )

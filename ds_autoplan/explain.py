"""Answers about plans: what a plan is, why not another one, how two differ. Text is in cli/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from ds_autoplan.api import plan as make_plan
from ds_autoplan.errors import InfeasibleError
from ds_autoplan.inputs import Inputs, recall
from ds_autoplan.plan import Plan
from ds_autoplan.reading import number
from ds_autoplan.search.options import PlanOptions

HEAD = (
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "zero_stage",
    "micro_batch_size",
    "num_micro_batches",
    "order",
)


def layer_groups(plan: Plan) -> list[dict[str, Any]]:
    """Runs of neighbouring layers with the same stage and strategy, first to last."""
    groups: list[dict[str, Any]] = []
    for layer in plan.layers:
        strategy = asdict(layer.strategy)
        last = groups[-1] if groups else None
        if last and last["stage"] == layer.stage and last["strategy"] == strategy:
            last["last_layer"] = layer.index
        else:
            groups.append(
                {
                    "first_layer": layer.index,
                    "last_layer": layer.index,
                    "stage": layer.stage,
                    "strategy": strategy,
                }
            )
    return groups


def why_not(plan: Plan, pins: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Price the best candidate with `pins` and say where it loses to `plan`, or what excludes it.

    Degrees that `pins` does not name are free, whatever the plan itself had pinned.

    Raises:
        BadInputError: the plan does not hold its inputs.
    """
    inputs = recall(plan)
    asked = {name: list(values) for name, values in pins.items()}
    pinned = {
        name: list(inputs.options.pins[name])
        for name, values in pins.items()
        if name in inputs.options.pins and not set(values) & set(inputs.options.pins[name])
    }
    options = PlanOptions(
        pins=pins,
        memory_reserve_gb=inputs.options.memory_reserve_gb,
        cost=inputs.options.cost,
        schedule=inputs.options.schedule,
        top_k=0,
    )
    number(plan.step_s, "The plan's step_s")
    answer: dict[str, Any] = {"candidate": asked, "pinned_otherwise": pinned}
    try:
        other = make_plan(inputs.graph, inputs.topology, inputs.workload, options)
    except InfeasibleError as error:
        return {**answer, "verdict": "infeasible", "reason": str(error)}
    answer["plan"] = head_of(other)
    answer["comparison_s"] = compare_breakdowns(plan, other)
    if other.fingerprint == plan.fingerprint:
        return {**answer, "verdict": "chosen", "reason": "This is the plan."}
    slower = other.step_s / plan.step_s - 1
    verdict = "slower" if slower > 1e-9 else ("faster" if slower < -1e-9 else "equal")
    return {**answer, "verdict": verdict, "reason": _reason(plan, other, slower, bool(pinned))}


def _reason(plan: Plan, other: Plan, slower: float, pinned: bool) -> str:
    if slower <= 1e-9:
        if pinned:
            return "It is excluded by the plan's own pins, not by its time."
        return "It is no slower; the plan was the simpler of equals, or its search was cut short."
    parts = [
        f"{key} {after:.4g} s instead of {before:.4g} s"
        for key, (before, after) in compare_breakdowns(plan, other).items()
        if after - before > 0.05 * (other.step_s - plan.step_s)
    ]
    tight = min(other.stages, key=lambda stage: stage.margin_bytes)
    checkpointed = sum(layer.strategy.activation_checkpointing != "none" for layer in other.layers)
    text = f"{slower:.1%} slower a step: {', '.join(parts)}."
    if checkpointed:
        text += (
            f" Memory makes {checkpointed} of {len(other.layers)} layers recompute "
            f"(margin {tight.margin_bytes / 1e9:.1f} GB)."
        )
    return text


def compare_breakdowns(before: Plan, after: Plan) -> dict[str, tuple[float, float]]:
    """Seconds per part of the step, in both plans, the largest change first."""
    keys = {*before.breakdown_s, *after.breakdown_s}
    pairs = {
        key: (before.breakdown_s.get(key, 0.0), after.breakdown_s.get(key, 0.0)) for key in keys
    }
    return dict(sorted(pairs.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0])))


def head_of(plan: Plan) -> dict[str, Any]:
    """The head keys of a plan, as in its alternatives."""
    degrees = asdict(plan.degrees)
    return {
        **{key: degrees[key] for key in HEAD},
        "step_s": plan.step_s,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "mfu": plan.mfu,
        "peak_bytes": max(stage.peak_bytes for stage in plan.stages),
        "layers": layer_groups(plan),
    }


def diff(before: Plan, after: Plan) -> dict[str, Any]:
    """What differs between two plans: degrees, cut, layers, time and memory."""
    old, new = asdict(before.degrees), asdict(after.degrees)
    degrees = {key: [old[key], new[key]] for key in HEAD if old[key] != new[key]}
    facts = {
        key: [getattr(before, key), getattr(after, key)]
        for key in (
            "model",
            "seq_length",
            "global_batch_size",
            "precision",
            "backend",
            "vocabulary",
        )
        if getattr(before, key) != getattr(after, key)
    }
    layers = [
        {
            "index": a.index,
            "before": {"stage": a.stage, **asdict(a.strategy)},
            "after": {"stage": b.stage, **asdict(b.strategy)},
        }
        for a, b in zip(before.layers, after.layers, strict=False)
        if (a.stage, a.strategy) != (b.stage, b.strategy)
    ]
    cut = [before.stage_bounds, after.stage_bounds]
    return {
        "same": before.fingerprint == after.fingerprint,
        "fingerprints": [before.fingerprint, after.fingerprint],
        "facts": facts,
        "degrees": degrees,
        "stages": cut if cut[0] != cut[1] else [],
        "layers": layers,
        "num_layers": [len(before.layers), len(after.layers)],
        "step_s": [before.step_s, after.step_s],
        "peak_bytes": [max(stage.peak_bytes for stage in plan.stages) for plan in (before, after)],
        "breakdown_s": {key: list(pair) for key, pair in compare_breakdowns(before, after).items()},
    }


def replan(inputs: Inputs, **pins: Any) -> Plan:
    """Plan again with other pins (absent ones stay)."""
    options = replace(inputs.options, pins={**inputs.options.pins, **pins})
    return make_plan(inputs.graph, inputs.topology, inputs.workload, options)

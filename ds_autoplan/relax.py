"""When nothing fits: the smallest single changes that would make it fit, each with its price."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ds_autoplan.errors import AutoplanError, BadInputError
from ds_autoplan.inputs import Inputs

if TYPE_CHECKING:
    from ds_autoplan.cluster import Topology
    from ds_autoplan.plan import Plan

_PIN_ORDER = (
    "activation_checkpointing",
    "micro_batch_size",
    "zero_stage",
    "sequence_parallel",
    "vocabulary",
    "attention",
    "mlp",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "vpp",
    "order",
)
_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_SPEC = re.compile(r"^(\d+)(x\d+x.+)$")
_RESERVE_STEPS = 6


def relaxations(inputs: Inputs) -> list[dict[str, Any]]:
    """Single changes under which a plan exists, the fastest resulting plan first.

    Each is {"change", "value", "text", "step_s", "plan": head keys}. Pins are dropped one by one,
    switched-off axes switched on, the reserve is reduced, devices are added, the sequence is cut.
    """
    found = []
    for change, value, text, changed in _single_changes(inputs):
        plan = _plan(changed)
        if plan is not None:
            chosen = getattr(plan.degrees, change, value)
            if change in inputs.options.pins and chosen is not None:
                pinned = " or ".join(str(item) for item in inputs.options.pins[change])
                text = f"{change}={chosen} instead of {pinned}"
            found.append(_priced(change, chosen, text, plan))
    found += _less_reserve(inputs)
    found += _first(_more_devices(inputs))
    found += _first(_shorter(inputs))
    if not found and inputs.options.pins:
        free = replace(inputs, options=replace(inputs.options, pins={}))
        plan = _plan(free)
        if plan is not None:
            found.append(_priced("pins", None, "drop all pins", plan))
        else:
            found += _first(_more_devices(free, "drop all pins and "))
    return sorted(found, key=lambda item: (item["step_s"], item["text"]))


def _plan(inputs: Inputs) -> Plan | None:
    from ds_autoplan.api import plan_without_help

    options = replace(inputs.options, top_k=0)
    try:
        return plan_without_help(replace(inputs, options=options))
    except AutoplanError:
        return None


def _priced(change: str, value: object, text: str, plan: Plan) -> dict[str, Any]:
    from ds_autoplan.explain import head_of

    head = head_of(plan)
    del head["layers"]
    return {"change": change, "value": value, "text": text, "step_s": plan.step_s, "plan": head}


_Change = tuple[str, object, str, Inputs]


def _single_changes(inputs: Inputs) -> Iterator[_Change]:
    options = inputs.options
    for name in _PIN_ORDER:
        if name in options.pins:
            pins = {key: value for key, value in options.pins.items() if key != name}
            yield name, None, f"let the planner choose {name}", _with(inputs, pins=pins)
    if not options.pipeline:
        yield "pipeline", True, "allow pipeline parallelism", _with(inputs, pipeline=True)
    if not options.tensor_parallel:
        text = "allow tensor parallelism"
        yield "tensor_parallel", True, text, _with(inputs, tensor_parallel=True)
    if inputs.workload.precision == "fp32":
        workload = replace(inputs.workload, precision="bf16")
        yield "precision", "bf16", "train in bf16", replace(inputs, workload=workload)


def _with(inputs: Inputs, **options: Any) -> Inputs:
    return replace(inputs, options=replace(inputs.options, **options))


def _less_reserve(inputs: Inputs) -> list[dict[str, Any]]:
    """The largest reserve that still fits, by bisection between none and the present one."""
    from ds_autoplan.search.options import DEFAULT_RESERVE

    total = inputs.topology.device.memory_bytes / 1e9
    present = inputs.options.memory_reserve_gb
    high = total * DEFAULT_RESERVE if present is None else present
    low = 0.0
    best = _plan(_with(inputs, memory_reserve_gb=low))
    if best is None or high == 0:
        return []
    for _ in range(_RESERVE_STEPS):
        middle = (low + high) / 2
        plan = _plan(_with(inputs, memory_reserve_gb=middle))
        if plan is None:
            high = middle
        else:
            low, best = middle, plan
    text = f"leave {low:.2f} GB free per device"
    return [_priced("memory_reserve_gb", low, text, best)]


def _more_devices(inputs: Inputs, before: str = "") -> Iterator[_Change]:
    for factor in _FACTORS:
        try:
            topology = scaled(inputs.topology, factor)
        except BadInputError:
            continue
        count = topology.num_devices
        text = f"{before}use {count} devices ({factor} times as many)"
        yield "devices", count, text, replace(inputs, topology=topology)


def _shorter(inputs: Inputs) -> Iterator[_Change]:
    for divisor in (2, 4, 8, 16):
        length = inputs.workload.seq_length // divisor
        if length:
            workload = replace(inputs.workload, seq_length=length)
            text = f"cut the sequence to {length}"
            yield "seq_length", length, text, replace(inputs, workload=workload)


def _first(changes: Iterator[_Change]) -> list[dict[str, Any]]:
    for change, value, text, changed in changes:
        plan = _plan(changed)
        if plan is not None:
            return [_priced(change, value, text, plan)]
    return []


def scaled(topology: Topology, factor: int) -> Topology:
    """The same kind of cluster with `factor` times as many nodes.

    Raises:
        BadInputError: a single node whose network is not known.
    """
    from ds_autoplan.cluster import parse_cluster

    spec = _SPEC.match(topology.name)
    if spec:
        return parse_cluster(f"{int(spec[1]) * factor}{spec[2]}")
    if len(topology.levels) < 2:
        raise BadInputError(
            f"The cluster {topology.name!r} is one node.", "Its network is not known."
        )
    last = topology.levels[-1]
    levels = (*topology.levels[:-1], replace(last, size=last.size * factor))
    return replace(topology, levels=levels)

"""The page: facts of the plan put into the words and lengths that the template shows.

Lengths of bars are percentages; the template does no arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ds_autoplan.cli.table import batch_text, degrees_text, range_text, search_text, seconds
from ds_autoplan.cost.model import MEMORY_KEYS
from ds_autoplan.explain import layer_groups
from ds_autoplan.inputs import recall_any
from ds_autoplan.plan import Plan

GB = 1e9
SHOWN_EXCLUSIONS = 12  # candidates named per reason


def render(plan: Plan, measured: list[dict[str, Any]] | None = None) -> str:
    """The page's HTML.

    Args:
        plan: the plan, as loaded.
        measured: rows of `validate` for measured runs, to show beside the prediction.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(**context(plan, measured or []))


def context(plan: Plan, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything the template names."""
    head: dict[str, Any] = plan.to_json()["plan"]
    head["sequence_parallel"] = plan.layers[0].strategy.sequence_parallel
    return {
        "plan": plan,
        "degrees": degrees_text(head),
        "facts": _facts(plan),
        "step": _step(plan),
        "stages": _stages(plan),
        "groups": layer_groups(plan),
        "runners_up": [
            {
                "degrees": degrees_text(other),
                "step": seconds(other["step_s"]),
                "longer": f"{other['step_s'] / plan.step_s - 1:+.1%}" if plan.step_s else "",
                "why": other["why"],
            }
            for other in plan.alternatives
        ],
        "exclusions": _exclusions(plan),
        "levels": _levels(plan),
        "measured": [_measured(row) for row in measured],
        "settings": plan.deepspeed(),
        "batch": batch_text(plan),
        "solver": _solver(plan),
    }


def _facts(plan: Plan) -> list[tuple[str, str]]:
    return [
        ("Predicted step", seconds(plan.step_s) + range_text(plan)),
        ("Tokens/s", f"{plan.tokens_per_s:,.0f}"),
        ("Tokens/s per device", f"{plan.tokens_per_s_per_gpu:,.0f}"),
        ("MFU", f"{plan.mfu:.1%}"),
        ("Uncalibrated time", f"{plan.uncalibrated_fraction:.0%}"),
    ]


def _step(plan: Plan) -> list[dict[str, Any]]:
    """Parts of the step, longest first, with their share of it."""
    parts = sorted(plan.breakdown_s.items(), key=lambda item: -item[1])
    total = sum(value for _, value in parts) or 1.0
    return [
        {"name": name, "text": seconds(value), "share": 100.0 * value / total}
        for name, value in parts
        if value > 0
    ]


def _stages(plan: Plan) -> list[dict[str, Any]]:
    """One bar a stage: its items of memory, against what a device has."""
    capacity = _capacity(plan)
    rows = []
    for index, stage in enumerate(plan.stages):
        layers = f"{stage.first_layer} to {stage.last_layer}"
        if plan.degrees.vpp > 1:
            layers = f"{stage.last_layer - stage.first_layer + 1} in {plan.degrees.vpp} chunks"
        rows.append(
            {
                "index": index,
                "layers": layers,
                "time": seconds(stage.time_s),
                "peak": f"{stage.peak_bytes / GB:.1f}",
                "margin": f"{stage.margin_bytes / GB:.1f}",
                "items": [
                    {
                        "name": name,
                        "text": f"{stage.memory[name] / GB:.1f} GB",
                        "share": 100.0 * stage.memory[name] / capacity,
                        "colour": MEMORY_KEYS.index(name),
                    }
                    for name in MEMORY_KEYS
                    if stage.memory.get(name, 0) > 0
                ],
            }
        )
    return rows


def _capacity(plan: Plan) -> float:
    largest = max((stage.peak_bytes + stage.margin_bytes for stage in plan.stages), default=0)
    inputs = recall_any(plan)
    return float(max(inputs.topology.device.memory_bytes if inputs else 0, largest, 1))


def _levels(plan: Plan) -> list[dict[str, str]]:
    inputs = recall_any(plan)
    return [
        {
            "name": level.name,
            "size": str(level.size),
            "rate": f"{level.bytes_per_s / GB:.1f} GB/s",
            "latency": seconds(level.latency_s),
        }
        for level in (inputs.topology.levels if inputs else ())
    ]


def _exclusions(plan: Plan) -> list[dict[str, Any]]:
    """Reasons, the most frequent first, with the candidates they exclude."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for item in plan.excluded:
        # By how much each candidate is too big makes no reason of its own.
        reason, _, amount = item["reason"].partition(": ")
        if reason != "does not fit in memory":
            reason, amount = item["reason"], ""
        by_reason[reason].append(_candidate(item["candidate"]) + (f" ({amount})" if amount else ""))
    return [
        {
            "reason": reason,
            "count": len(names),
            "shown": names[:SHOWN_EXCLUSIONS],
            "more": max(0, len(names) - SHOWN_EXCLUSIONS),
        }
        for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    ]


def _candidate(given: dict[str, Any]) -> str:
    """A partly stated setting: tp=2 ZeRO 2 or 3; cp, ep and vpp where they are not 1."""
    words = []
    for key, value in given.items():
        if key in ("cp", "ep", "vpp") and value == 1:
            continue
        text = " or ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        name = key.replace("_", " ").replace("zero stage", "ZeRO")
        words.append(f"{name} {text.replace('>', 'above ')}")
    return ", ".join(words)


def _measured(row: dict[str, Any]) -> dict[str, str]:
    def pair(key: str, form: Any) -> str:
        return form(row[key]) if row.get(key) is not None else "-"

    return {
        "id": str(row["id"]),
        "reason": str(row.get("reason") or ""),
        "measured": pair("measured_step_s", seconds),
        "predicted": pair("predicted_step_s", seconds),
        "error": pair("time_error", "{:+.1%}".format),
        "measured_gb": pair("measured_peak_gb", "{:.1f}".format),
        "predicted_gb": pair("predicted_peak_gb", "{:.1f}".format),
        "memory_error": pair("memory_error", "{:+.1%}".format),
    }


def _solver(plan: Plan) -> list[tuple[str, str]]:
    solver = plan.solver
    rows = [
        ("Status", solver.status),
        ("Objective", seconds(solver.objective_s)),
        ("Bound", seconds(solver.bound_s)),
        ("Gap", f"{solver.gap:.2g}"),
        ("Candidates", search_text(plan)),
    ]
    folding = plan.report.get("folding")
    if folding:
        rows.append(
            (
                "Folding",
                f"{folding['blocks']} blocks of {folding['operators']} operators, "
                f"{folding['distinct_blocks']} distinct",
            )
        )
    return rows

"""Plain-text tables and numbers for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ds_autoplan.explain import layer_groups
from ds_autoplan.plan import Plan, StagePlan

GB = 1e9


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    numeric = [
        all(isinstance(row[i], int | float) or _number(str(row[i])) for row in rows)
        for i in range(len(header))
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _number(text: str) -> bool:
    return text.lstrip("-").replace(".", "", 1).replace("%", "", 1).replace("e", "", 1).isdigit()


def seconds(value: float) -> str:
    """A time with its unit."""
    if value >= 0.1:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3f} ms" if value >= 1e-4 else f"{value * 1e6:.1f} us"


def degrees_text(head: dict[str, Any]) -> str:
    """tp=2 pp=4 dp=8 ..., leaving out axes that are 1."""
    parts = [f"{key}={head[key]}" for key in ("tp", "pp", "dp")]
    parts += [f"{key}={head[key]}" for key in ("cp", "ep", "vpp") if head.get(key, 1) != 1]
    parts.append(f"ZeRO {head['zero_stage']}")
    parts.append(f"micro-batch {head['micro_batch_size']}")
    if head.get("sequence_parallel"):
        parts.append("sequence parallel")
    return " ".join(parts)


def plan_text(plan: Plan) -> str:
    """The whole plan for people: head, stages, layers, step, search, runners-up, assumptions."""
    parts = [*_head(plan), "", _stages(plan), "", _layers(plan), "", *_search(plan)]
    if plan.alternatives:
        rows = [
            [degrees_text(other), seconds(other["step_s"]), other["why"]]
            for other in plan.alternatives
        ]
        parts += ["", table(["runner-up", "step", "why it lost"], rows)]
    parts += ["", _settings(plan)]
    parts += [f"Assumes: {note}" for note in plan.assumptions]
    return "\n".join(parts)


def _settings(plan: Plan) -> str:
    if plan.backend != "deepspeed":
        return f"Run it with Megatron: ds-autoplan export PLAN.json --to {plan.backend}"
    settings = plan.deepspeed()
    if settings["train_micro_batch_size_per_gpu"] is None:
        return f"DeepSpeed settings: none; {batch_text(plan)}"
    return "DeepSpeed settings: " + ", ".join(
        f"{key} {value['stage'] if isinstance(value, dict) else value}"
        for key, value in settings.items()
    )


def batch_text(plan: Plan) -> str:
    """Why no script under data parallelism has the plan's batch."""
    calls = plan.deepspeed()["gradient_accumulation_steps"]
    return (
        f"{plan.global_batch_size} samples a step, in {calls} engine call{'s' * (calls > 1)}, are "
        f"no whole number for each of {plan.degrees.world_size} ranks"
    )


def range_text(plan: Plan) -> str:
    """Where nine of ten measured runs would lie, in brackets; empty for plans without it."""
    low, high = plan.report.get("range_s") or (0.0, 0.0)
    return f" ({seconds(low)} to {seconds(high)})" if high else ""


def search_text(plan: Plan) -> str:
    """How many candidates there were, and what became of them."""
    solver = plan.solver
    rest = solver.candidates - solver.solved - solver.pruned
    large = f", {rest} too large" if rest > 0 else ""
    return f"{solver.candidates} candidates: {solver.solved} solved, {solver.pruned} pruned{large}"


def _head(plan: Plan) -> list[str]:
    d = plan.degrees
    degrees = {
        **{key: getattr(d, key) for key in ("tp", "pp", "dp", "cp", "ep", "vpp", "zero_stage")},
        "micro_batch_size": d.micro_batch_size,
        "sequence_parallel": plan.layers[0].strategy.sequence_parallel,
    }
    cluster = plan.cluster.get("name") or plan.cluster.get("device", "")
    return [
        f"{plan.model} on {cluster} ({d.world_size} devices), sequence {plan.seq_length}, "
        f"global batch {plan.global_batch_size}, {plan.precision}, {plan.backend}",
        f"Plan {plan.fingerprint}: {degrees_text(degrees)} x {d.num_micro_batches}, "
        f"vocabulary {plan.vocabulary}",
        f"Step {seconds(plan.step_s)}{range_text(plan)}, {plan.tokens_per_s:,.0f} tokens/s "
        f"({plan.tokens_per_s_per_gpu:,.0f} per device), MFU {plan.mfu:.1%}, "
        f"{plan.uncalibrated_fraction:.0%} of the time from uncalibrated constants",
    ]


def _stages(plan: Plan) -> str:
    rows = [
        [
            index,
            _span(stage, plan.degrees.vpp),
            seconds(stage.time_s),
            f"{stage.peak_bytes / GB:.1f}",
            f"{stage.margin_bytes / GB:.1f}",
            ", ".join(
                f"{key} {value / GB:.1f}"
                for key, value in stage.memory.items()
                if value > 0.05 * GB
            ),
        ]
        for index, stage in enumerate(plan.stages)
    ]
    return table(["stage", "layers", "micro-batch", "peak GB", "margin GB", "of which"], rows)


def _span(stage: StagePlan, vpp: int) -> str:
    if vpp > 1:
        return f"{stage.last_layer - stage.first_layer + 1} in {vpp} chunks"
    return f"{stage.first_layer}-{stage.last_layer}"


def _layers(plan: Plan) -> str:
    rows = [
        [
            f"{group['first_layer']}-{group['last_layer']}",
            group["stage"],
            group["strategy"]["attention"],
            group["strategy"]["mlp"],
            "yes" if group["strategy"]["sequence_parallel"] else "no",
            group["strategy"]["activation_checkpointing"],
        ]
        for group in layer_groups(plan)
    ]
    header = ["layers", "stage", "attention", "mlp", "sequence parallel", "checkpointing"]
    return table(header, rows)


def _search(plan: Plan) -> list[str]:
    solver = plan.solver
    parts = sorted(plan.breakdown_s.items(), key=lambda item: -item[1])
    took = "" if solver.seconds is None else f", {solver.seconds:.2f} s"
    lines = [
        "Step: " + ", ".join(f"{key} {seconds(value)}" for key, value in parts if value > 0),
        f"Search: {search_text(plan)}; {solver.status}, gap {solver.gap:.2g}{took}",
    ]
    folding = plan.report.get("folding")
    if folding:
        lines.append(
            f"Folding: {folding['blocks']} blocks of {folding['operators']} operators, "
            f"{folding['distinct_blocks']} distinct; of {folding['candidates']} sharding patterns "
            f"{folding['rejected']} do not connect, {folding['kept']} are kept"
        )
    proof = plan.report.get("proof")
    if proof:
        bound = f", bound {seconds(proof['bound_s'])}" if "bound_s" in proof else ""
        lines.append(f"Proof: {proof.get('solver', '')} {proof['status']}{bound}")
    return lines

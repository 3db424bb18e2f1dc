"""`ds-autoplan validate`: price measured runs and compare.

time_error = predicted / measured - 1. The regret of a ranking group is the measured step time of
the setting predicted fastest over the measured fastest, minus 1 (1.0 where the chosen one ran out
of memory). A run that cannot be priced stays in the output as `supported: false` with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ds_autoplan.cost.interface import StageEstimate
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.cost.rows import Row, read_row
from ds_autoplan.errors import AutoplanError
from ds_autoplan.reading import MALFORMED

# A predicted peak this far above the device's memory counts as "does not fit".
FIT_TOLERANCE = 1.06


def peak_bytes(stages: tuple[StageEstimate, ...], row: Row) -> float:
    """Predicted peak, counted as the row's source counts it.

    "allocated" leaves out the CUDA context, NCCL and what the allocator wastes.
    """
    considered = stages[-1:] if row.peak_kind.endswith(":last") else stages
    kind = row.peak_kind.split(":")[0]
    waste = 1.0 + row.framework.wasted(row.degrees.vpp)
    peaks = []
    for stage in considered:
        memory = stage.memory
        states = memory["parameters"] + memory["gradients"] + memory["optimizer"]
        dynamic = memory["activations"] + memory["workspace"]
        if kind == "allocated":
            peaks.append(states + dynamic / waste)
        elif kind == "reserved":
            peaks.append(states + dynamic)
        else:
            peaks.append(states + dynamic + memory["overhead"])
    return max(peaks)


def price_run(run: dict[str, Any]) -> dict[str, Any]:
    """Price one run: the object that `validate --json` lists."""
    result: dict[str, Any] = {
        "id": str(run.get("id", "?")),
        "supported": False,
        "reason": "",
        "measured_step_s": None,
        "predicted_step_s": None,
        "time_error": None,
        "measured_peak_gb": None,
        "predicted_peak_gb": None,
        "memory_error": None,
    }
    try:
        return {**result, **price(read_row(run))}
    except AutoplanError as error:
        result["reason"] = str(error)
    except MALFORMED as error:  # one row may not hide the others
        result["reason"] = f"The row cannot be priced: {type(error).__name__}: {error}."
    return result


def price(row: Row) -> dict[str, Any]:
    """What is known of one readable run: prediction, measurement, errors.

    Raises:
        AutoplanError: the device lacks what the run used.
    """
    model = AnalyticCostModel(
        row.graph, row.topology, row.workload, row.framework, shard_group=row.shard_group
    )
    priced = model.step(row.degrees, row.stages, row.vocabulary)
    result: dict[str, Any] = {
        "supported": True,
        "predicted_step_s": priced.step_s,
        "measured_step_s": row.measured_step_s,
        "family": row.family,
    }
    result["range_s"] = list(priced.range_s)
    result["precision"] = row.workload.precision
    result["mixture"] = any(block.mlp and block.mlp.num_experts for block in row.graph.classes)
    if row.measured_step_s:
        result["time_error"] = priced.step_s / row.measured_step_s - 1.0
    unit = 1e9 if row.memory_unit == "GB" else 2**30
    predicted = peak_bytes(priced.stages, row)
    result["predicted_peak_gb"] = predicted / unit
    result["fits"] = (
        max(stage.peak_bytes for stage in priced.stages) <= model.capacity_bytes() * FIT_TOLERANCE
    )
    if row.measured_peak_bytes:
        result["measured_peak_gb"] = row.measured_peak_bytes / unit
        result["memory_error"] = predicted / row.measured_peak_bytes - 1.0
    return result


def validate(
    runs: list[dict[str, Any]], groups: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Price all `runs` and summarise; see the module's docstring for the terms."""
    rows = [price_run(run) for run in runs]
    if groups is None:
        groups = derived_groups(runs, rows)
    supported = [row for row in rows if row["supported"]]
    times = [row["time_error"] for row in supported if row["time_error"] is not None]
    memories = [row["memory_error"] for row in supported if row["memory_error"] is not None]
    return {
        "rows": rows,
        "summary": {
            "rows": len(rows),
            "supported": len(supported),
            "time": spread(times),
            "time_by_kind": {
                kind: spread([row["time_error"] for row in supported if _kind(row) == kind])
                for kind in ("dense 16-bit", "dense 8-bit", "mixture")
            },
            "memory": {
                "n": len(memories),
                "mape": _mean([abs(error) for error in memories]),
                "worst_under": min(memories, default=0.0),
            },
            "ranking": ranking(groups, {row["id"]: row for row in rows}),
            "families": _families(supported),
        },
    }


def spread(errors: list[float | None]) -> dict[str, Any]:
    """Size, mean, median and 90th percentile of absolute errors, and the mean signed error."""
    known = [error for error in errors if error is not None]
    ordered = sorted(abs(error) for error in known)
    count = len(ordered)
    return {
        "n": count,
        "mape": _mean(ordered),
        "median_ape": _quantile(ordered, 0.5),
        "p90_ape": _quantile(ordered, 0.9),
        "bias": _mean(known),
    }


def ranking(groups: list[dict[str, Any]], rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Regret and rank correlation over groups of runs that differ only in parallel settings."""
    regrets, taus = [], []
    for group in groups:
        members = []
        for entry in group.get("rows_fastest_first", []):
            row = rows.get(entry["id"])
            if row is None or not row["supported"]:
                continue
            out_of_memory = bool(entry.get("oom"))
            measured = entry.get("iteration_s") or row["measured_step_s"]
            if measured or out_of_memory:
                members.append(
                    (
                        row["predicted_step_s"],
                        measured,
                        out_of_memory,
                        row["fits"],
                        row["predicted_peak_gb"],
                    )
                )
        ran = [member for member in members if not member[2]]
        if len(members) < 2 or not ran:
            continue
        fitting = [member for member in members if member[3]] or members
        # Of equally fast settings, the one that needs less memory.
        chosen = min(fitting, key=lambda member: (member[0], member[4]))
        fastest = min(member[1] for member in ran)
        regrets.append(1.0 if chosen[2] else chosen[1] / fastest - 1.0)
        taus.append(kendall_tau([m[0] for m in ran], [m[1] for m in ran]))
    return {
        "groups": len(regrets),
        "mean_regret": _mean(regrets),
        "max_regret": max(regrets, default=0.0),
        "kendall_tau": _mean(taus),
    }


def kendall_tau(first: list[float], second: list[float]) -> float:
    """Rank correlation: concordant minus discordant pairs, over all pairs that are not tied."""
    agree = counted = 0
    for i in range(len(first)):
        for j in range(i):
            product = (first[i] - first[j]) * (second[i] - second[j])
            if product:
                agree += 1 if product > 0 else -1
                counted += 1
    return agree / counted if counted else 1.0


def derived_groups(runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of runs of one family, model, cluster and batch, where no groups file was given."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run, row in zip(runs, rows, strict=True):
        if not row["supported"] or not row["measured_step_s"]:
            continue
        # A run of this plugin is priced by its plan and may lack some of these.
        hardware, model = run.get("hardware") or {}, run.get("model") or {}
        key = (
            row["family"],
            sorted((name, str(value)) for name, value in model.items()),
            hardware.get("gpu"),
            hardware.get("n_gpus"),
            (run.get("batch") or {}).get("global"),
            run.get("precision"),
        )
        found[str(key)].append({"id": row["id"], "iteration_s": row["measured_step_s"]})
    return [{"rows_fastest_first": entries} for entries in found.values() if len(entries) > 1]


def _kind(row: dict[str, Any]) -> str:
    if row["mixture"]:
        return "mixture"
    return "dense 8-bit" if row["precision"] in ("fp8", "fp4") else "dense 16-bit"


def _families(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, list[float | None]] = defaultdict(list)
    for row in rows:
        found[row["family"]].append(row["time_error"])
    return {family: spread(errors) for family, errors in sorted(found.items())}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _quantile(ordered: list[float], share: float) -> float:
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

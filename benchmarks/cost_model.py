"""Fit the cost model's constants on measured runs, and predict families it has not seen.

    python -m benchmarks.cost_model RUNS.jsonl                  errors with the shipped constants
    python -m benchmarks.cost_model RUNS.jsonl --fit            fit all constants, print old and new
    python -m benchmarks.cost_model RUNS.jsonl --leave-one-out  fit without each family, predict it
    python -m benchmarks.cost_model RUNS.jsonl --leave-one-out --groups GROUPS.json   regrets, too
    python -m benchmarks.cost_model RUNS.jsonl --residuals F    write the table that gives ranges

A family is one publisher's runs with one engine. Leaving it out also resets what only it could
have taught: constants of an engine that no other family uses go back to the generic engine's, those
of memory too.

The fit minimises sum_i w_i * huber(log(predicted_i / measured_i)) over bounded constants by
Levenberg-Marquardt with a numeric Jacobian; w_i falls with the size of a row's family, so that a
table with a hundred near-equal rows does not outweigh ten varied ones.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ds_autoplan.cost import constants as fitted
from ds_autoplan.cost import frameworks
from ds_autoplan.cost.constants import Constants
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.cost.rows import Row, read_row
from ds_autoplan.errors import AutoplanError
from ds_autoplan.runs import load_runs
from ds_autoplan.validate import price, ranking, spread

BACKWARD_OVER_FORWARD = 0.8  # attention: backward share of the matmul rate over the forward share
HUBER = 0.12
ROWS_PER_CELL = 4  # rows of one family, engine, device and precision that a fit looks at


@dataclass(frozen=True)
class Parameter:
    """One fitted constant: `kind` is "rate", "attention", "constant" or "engine"."""

    kind: str
    where: tuple[str, ...]
    low: float
    high: float
    prior: float

    @property
    def name(self) -> str:
        """For tables."""
        return " ".join((self.kind, *self.where))


PARAMETERS = (
    *(Parameter("rate", where, 0.3, 1.0, 0.8) for where in fitted.SUSTAINED),
    *(
        Parameter("attention", where, 0.1, 0.9, 0.4)
        for where in fitted.ATTENTION_SHARE
        if where[0] in ("ampere", "hopper", "blackwell")
        and where not in (("ampere", "fused"), ("blackwell", "flash1"), ("hopper", "flash"))
    ),
    Parameter("constant", ("cast_bytes_hopper",), 2.0, 16.0, 6.0),
    Parameter("engine", ("nemo", "tp_overlap"), 0.0, 0.9, 0.0),
    Parameter(
        "engine",
        ("fsdp+internevo+megatron-deepspeed-blocking", "elementwise_passes"),
        0.8,
        3.0,
        1.5,
    ),
    Parameter("engine", ("nemo+megatron", "expert_stall_s"), 0.0, 1e-3, 1e-4),
    Parameter("engine", ("nemo+megatron", "dispatch_stall_s"), 0.0, 5e-3, 5e-4),
    Parameter("engine", ("nemo+megatron", "permute_passes"), 2.0, 8.0, 4.0),
    Parameter("engine", ("nemo-graphs", "ep_overlap"), 0.0, 0.9, 0.3),
    # The prior: a broadcast of each of a 7B model's 291 tensors, passed on from rank to rank at
    # 3.6 us a hop (7 of 8 hops inside a node, 3 us; 1 of 8 over the network, 8 us).
    Parameter("engine", ("internevo", "broadcast_s"), 0.0, 1e-2, 1e-3),
    Parameter("engine", ("internevo", "step_overhead_s"), 0.0, 1.0, 0.01),
    # The prior: from a launch to the kernel's start (see frameworks.BLOOM).
    Parameter("engine", ("megatron-deepspeed-blocking", "launch_stall_s"), 0.0, 1e-4, 2e-5),
)


# What was fitted on memory rows, and the engine whose constants stand in where only one family
# could have taught them. All else in the memory model is counted, or measured by others.
MEMORY_CONSTANTS = ("fragmentation", "interleaved_fragmentation")
BASES = {
    "nemo": frameworks.MEGATRON,
    "megatron-deepspeed-blocking": frameworks.DEEPSPEED,
}


def engine(name: str) -> frameworks.Framework:
    """The shipped framework of that name."""
    known = [item for item in vars(frameworks).values() if isinstance(item, frameworks.Framework)]
    return next(item for item in known if item.name == name)


def shipped(parameter: Parameter) -> float:
    """The value that the package ships."""
    if parameter.kind == "rate":
        return fitted.SUSTAINED[parameter.where]
    if parameter.kind == "attention":
        return fitted.ATTENTION_SHARE[parameter.where][0]
    if parameter.kind == "constant":
        return float(getattr(fitted.DEFAULT, parameter.where[0]))
    return float(getattr(engine(parameter.where[0].split("+")[0]), parameter.where[1]))


def assemble(values: np.ndarray) -> tuple[Constants, dict[str, dict[str, float]]]:
    """Constants, and changes by engine, from a vector in the order of PARAMETERS."""
    sustained, attention = dict(fitted.SUSTAINED), dict(fitted.ATTENTION_SHARE)
    plain: dict[str, float] = {}
    engines: dict[str, dict[str, float]] = defaultdict(dict)
    for parameter, value in zip(PARAMETERS, values, strict=True):
        if parameter.kind == "rate":
            sustained[parameter.where] = float(value)
        elif parameter.kind == "attention":
            attention[parameter.where] = (float(value), float(value) * BACKWARD_OVER_FORWARD)
        elif parameter.kind == "constant":
            plain[parameter.where[0]] = float(value)
        else:
            for name in parameter.where[0].split("+"):
                engines[name][parameter.where[1]] = float(value)
    constants = replace(fitted.DEFAULT, sustained=sustained, attention_share=attention, **plain)
    return constants, engines


def touches(parameter: Parameter, row: Row) -> bool:
    """Whether the constant can change the row's price."""
    device = row.topology.device
    if parameter.kind == "rate":
        return parameter.where[0] in (device.name, device.architecture)
    if parameter.kind == "attention":
        return parameter.where[0] == device.architecture
    if parameter.kind == "engine":
        return row.framework.name in parameter.where[0].split("+")
    return True


def ratios(values: np.ndarray, rows: list[Row]) -> np.ndarray:
    """Predicted over measured step time."""
    constants, engines = assemble(values)
    found = []
    for row in rows:
        changed = replace(row.framework, **engines.get(row.framework.name, {}))
        model = AnalyticCostModel(
            row.graph,
            row.topology,
            row.workload,
            changed,
            constants,
            shard_group=row.shard_group,
        )
        found.append(model.step(row.degrees, row.stages, "shard").step_s / row.measured_step_s)
    return np.array(found)


def thinned(rows: list[Row]) -> list[Row]:
    """At most ROWS_PER_CELL rows of each cell, evenly taken."""
    cells: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        device, precision = row.topology.device.name, row.workload.precision
        cells[(row.family, row.framework.name, device, precision, row.graph.name)].append(row)
    kept = []
    for cell in cells.values():
        step = max(1, -(-len(cell) // ROWS_PER_CELL))
        kept += cell[::step]
    return kept


def fit(rows: list[Row], start: np.ndarray, iterations: int = 5) -> np.ndarray:
    """Minimise; see the module's docstring."""
    low = np.array([p.low for p in PARAMETERS])
    high = np.array([p.high for p in PARAMETERS])
    sizes = Counter(row.family for row in rows)
    weights = np.array([sizes[row.family] ** -0.25 for row in rows])
    weights /= weights.mean()

    touched = [
        np.array([index for index, row in enumerate(rows) if touches(parameter, row)], dtype=int)
        for parameter in PARAMETERS
    ]

    def robust(found: np.ndarray, which: np.ndarray | slice) -> np.ndarray:
        raw = weights[which] * np.log(found)
        size = np.abs(raw)
        soft = np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0))
        return np.where(size <= HUBER, raw, np.sign(raw) * soft)

    def residuals(values: np.ndarray) -> np.ndarray:
        # A weak pull to the start keeps constants still that the rows say nothing of.
        pull = 0.1 * (values - start) / (high - low)
        return np.concatenate([robust(ratios(values, rows), slice(None)), pull])

    values, damping = start.copy(), 1e-2
    current = residuals(values)
    for _ in range(iterations):
        jacobian = np.zeros((len(current), len(values)))
        for index, which in enumerate(touched):
            shift = 1e-3 * (high[index] - low[index])
            moved = values.copy()
            moved[index] += shift if values[index] + shift <= high[index] else -shift
            jacobian[len(rows) + index, index] = 0.1 / (high[index] - low[index])
            if len(which):
                after = robust(ratios(moved, [rows[row] for row in which]), which)
                jacobian[which, index] = (after - current[which]) / (moved[index] - values[index])
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        before = float(current @ current)
        for _ in range(6):
            scaled = normal + damping * np.diag(np.diag(normal) + 1e-9)
            trial = np.clip(values - np.linalg.solve(scaled, gradient), low, high)
            attempt = residuals(trial)
            if float(attempt @ attempt) < before:
                values, current, damping = trial, attempt, max(damping / 5, 1e-6)
                break
            damping *= 5
        if before - float(current @ current) < 1e-4 * before:
            break
    return values


def kind(row: Row) -> str:
    """Which target a row counts for."""
    if any(block.mlp is not None and block.mlp.num_experts for block in row.graph.classes):
        return "mixture"
    return "dense 8-bit" if row.workload.precision in ("fp8", "fp4") else "dense 16-bit"


def table(title: str, rows: list[Row], found: np.ndarray) -> dict[str, Any]:
    """Print errors by kind and by family, and return them."""
    groups: dict[str, list[float | None]] = defaultdict(list)
    for row, ratio in zip(rows, found, strict=True):
        groups[kind(row)].append(float(ratio) - 1.0)
        groups[f"  {row.family}"].append(float(ratio) - 1.0)
    print(title)
    print(f"{'':44} {'n':>4} {'mean':>6} {'median':>6} {'90th':>6} {'bias':>6}")
    result = {}
    for name in sorted(groups, key=lambda item: (item.startswith(" "), item)):
        errors = spread(groups[name])
        result[name.strip()] = errors
        figures = (errors[key] for key in ("mape", "median_ape", "p90_ape", "bias"))
        print(f"{name:44} {errors['n']:4d} " + " ".join(f"{100 * x:5.1f}%" for x in figures))
    return result


def leave_one_out(rows: list[Row]) -> np.ndarray:
    """Predict each family with constants fitted on all others."""
    found = np.empty(len(rows))
    for family in sorted({row.family for row in rows}):
        rest = [row for row in rows if row.family != family]
        engines = {row.framework.name for row in rest}
        devices = {name for row in rest for name in _device_names(row)}
        start = np.array(
            [shipped(p) if _taught(p, engines, devices) else p.prior for p in PARAMETERS]
        )
        values = fit(thinned(rest), start)
        mine = [index for index, row in enumerate(rows) if row.family == family]
        found[mine] = ratios(values, [rows[index] for index in mine])
        error = np.mean(np.abs(found[mine] - 1.0))
        print(f"without {family:40} mean error on it {100 * error:5.1f}%", flush=True)
    return found


def _device_names(row: Row) -> tuple[tuple[str, str], ...]:
    precision = "bf16" if row.workload.precision == "fp16" else row.workload.precision
    device = row.topology.device
    exact = (device.name, row.workload.precision), (device.name, precision)
    return (*exact, (device.architecture, row.workload.precision), (device.architecture, precision))


def _taught(parameter: Parameter, engines: set[str], devices: set[tuple[str, str]]) -> bool:
    if parameter.kind == "engine":
        return any(name in engines for name in parameter.where[0].split("+"))
    return parameter.kind != "rate" or parameter.where in devices


def regrets(
    groups: list[dict[str, Any]], everything: list[Row], rows: list[Row], found: np.ndarray
) -> dict[str, Any]:
    """Ranking of the groups where `rows` take `found` times what they took; memory as shipped."""
    priced = {row.id: price(row) for row in everything}
    for row, ratio in zip(rows, found, strict=True):
        priced[row.id]["predicted_step_s"] = float(ratio) * (row.measured_step_s or 0.0)
    answer = ranking(groups, priced)
    print(
        f"ranking: {answer['groups']} groups, mean regret {answer['mean_regret']:.1%}, "
        f"largest {answer['max_regret']:.1%}, Kendall tau {answer['kendall_tau']:.2f}"
    )
    return answer


def unseen_memory(rows: list[Row]) -> dict[str, Any]:
    """Print peak memory where engines that one family alone runs keep what their base keeps."""
    families: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        families[row.framework.name].add(row.family)
    errors = []
    for row in rows:
        base = BASES.get(row.framework.name)
        if base is not None and len(families[row.framework.name]) == 1:
            taught = {name: getattr(base, name) for name in MEMORY_CONSTANTS}
            row = replace(row, framework=replace(row.framework, **taught))
        priced = price(row)
        if priced.get("memory_error") is not None:
            errors.append(priced["memory_error"])
    summary = spread(list(errors))
    worst = min(errors, default=0.0)
    print(f"peak memory: {summary['n']} runs, mean {summary['mape']:.1%}, worst under {-worst:.1%}")
    return {**summary, "worst_under": -worst}


def residuals_table(rows: list[Row], found: np.ndarray) -> list[dict[str, Any]]:
    """Errors by engine, architecture, precision and kind: what ranges are made from."""
    cells: dict[tuple[str, str, str, bool], list[float]] = defaultdict(list)
    for row, ratio in zip(rows, found, strict=True):
        key = (
            row.framework.name,
            row.topology.device.architecture,
            "8-bit" if row.workload.precision in ("fp8", "fp4") else "16-bit",
            kind(row) == "mixture",
        )
        cells[key].append(float(ratio) - 1.0)
    lines = []
    for key, errors in sorted(cells.items()):
        summary = spread(list(errors))
        lines.append(
            {
                "engine": key[0],
                "architecture": key[1],
                "precision": key[2],
                "mixture": key[3],
                "runs": len(errors),
                "p90": round(summary["p90_ape"], 4),
            }
        )
    return lines


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", help="measured runs, one JSON object a line")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--groups", help="ranking groups: print regrets for them")
    parser.add_argument("--residuals", help="write the residuals table there")
    parser.add_argument("--json", help="write the errors there")
    arguments = parser.parse_args()
    everything = []
    for run in load_runs(arguments.runs):
        try:
            everything.append(read_row(run))
        except AutoplanError as error:
            print(f"not priced: {run.get('id')}: {error}")
    rows = [row for row in everything if row.measured_step_s]
    groups = json.loads(Path(arguments.groups).read_text()) if arguments.groups else []
    start = np.array([shipped(parameter) for parameter in PARAMETERS])
    found = ratios(start, rows)
    result = {"shipped": table("shipped constants", rows, found)}
    if arguments.fit:
        values = fit(thinned(rows), start)
        for parameter, old, new in zip(PARAMETERS, start, values, strict=True):
            print(f"{parameter.name:60} {old:10.5f} -> {new:10.5f}")
        result["fitted"] = table("fitted constants", rows, ratios(values, rows))
    if arguments.leave_one_out:
        unseen = leave_one_out(rows)
        result["unseen"] = table("each family with constants of the others", rows, unseen)
        if groups:
            result["unseen ranking"] = regrets(groups, everything, rows, unseen)
        result["unseen memory"] = unseen_memory(everything)
        found = unseen
    if arguments.residuals:
        lines = residuals_table(rows, found)
        text = ",\n ".join(json.dumps(line) for line in lines)
        Path(arguments.residuals).write_text(f"[\n {text}\n]\n", encoding="utf-8")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

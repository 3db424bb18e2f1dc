"""The stage problem as integer programs, stated with PuLP and solved by HiGHS.

Folded, with counts (size independent of how many layers are alike):

    y[s,i,j]  in {0,1}: stage s runs layers i..j-1       x[s,c,k] >= 0, integer: how many layers of
    u[s,c,k]  in {0,1}: stage s uses choice k of class c     class c on stage s take choice k
    W_s workspace,  tau >= T_s,  rho >= R_s

    minimise  sum_weight * sum_s T_s + max_weight * tau + rho
    (objective) s.t.      sum_j y[0,0,j] = 1,  sum_i y[s,i,j] = sum_k y[s+1,j,k]
    (path)
              sum_k x[s,c,k] = sum_ij count_c(i,j) * y[s,i,j]                               (cover)
              x[s,c,k] <= n_c * u[s,c,k],  W_s >= workspace_ck * u[s,c,k]
              (workspace) state_s + sum x * bytes_ck(s) + in_flight_s * sum y * carried_i + W_s <=
              capacity_s (memory)

Unfolded, one binary z[l,s,k] per layer, stage and choice, as UniAP states it: every layer has one
stage and one choice, stages are contiguous and not empty, a cut is charged where neighbours sit on
different stages. Both have the same optimum; the unfolded one is slow because equal layers are
interchangeable.

Bytes are scaled by the capacity and times by the serial time, so that HiGHS's tolerances (set to
1e-9) mean the same for every problem. Status, bound and gap are HiGHS's own, not PuLP's summary of
them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pulp

from ds_autoplan.search.heuristic import spread
from ds_autoplan.search.mix import Mix
from ds_autoplan.search.problem import Choice, Problem, Solution, evaluate, prefix_counts

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Answer:
    """What HiGHS said: `solution` is None where it found none."""

    solution: Solution | None
    status: str
    bound_s: float
    gap: float


class _Scale:
    def __init__(self, problem: Problem) -> None:
        slowest = [max(choice.time_s for choice in choices) for choices in problem.choices]
        total = sum(slowest[layer] for layer in problem.layers)
        total += sum(stage.time_s for stage in problem.stages)
        self.time = total or 1.0
        self.bytes = max(stage.capacity_bytes for stage in problem.stages) or 1.0


def solve_folded(
    problem: Problem, time_limit_s: float | None = None, bounds: tuple[int, ...] | None = None
) -> Answer:
    """The optimum by the folded program; where `bounds` are given, under that cut."""
    scale = _Scale(problem)
    model = pulp.LpProblem("stages", pulp.LpMinimize)
    paths = _paths(model, problem, bounds)
    counts = prefix_counts(problem)
    tau, rho = model.add_variable("tau", 0), model.add_variable("rho", 0)
    times: list[Any] = []
    mixes: list[dict[tuple[int, int], Any]] = []
    for index, stage in enumerate(problem.stages):
        mix, used, workspace = _stage_counts(model, problem, index, paths[index], counts)
        mixes.append(mix)
        spans = paths[index].items()
        cuts = [(problem.cut_time(j), y) for (_, j), y in spans if j < len(problem.layers)]
        time_s = stage.time_s / scale.time + pulp.lpSum(
            [problem.choices[c][k].time_s / scale.time * x for (c, k), x in mix.items()]
            + [seconds / scale.time * y for seconds, y in cuts if seconds]
        )
        times.append(time_s)
        model += tau >= time_s, f"slowest_{index}"
        step = pulp.lpSum(
            problem.choices[c][k].per_step_s / scale.time * x for (c, k), x in mix.items()
        )
        model += rho >= step + stage.per_step_s / scale.time, f"per_step_{index}"
        held = stage.state_bytes + stage.in_flight * stage.activation_bytes
        bytes_ = pulp.lpSum(
            [
                (
                    problem.choices[c][k].state_bytes
                    + stage.in_flight * problem.choices[c][k].activation_bytes
                )
                / scale.bytes
                * x
                for (c, k), x in mix.items()
            ]
            + [
                stage.in_flight * problem.carried(i) / scale.bytes * y
                for (i, _), y in spans
                if problem.carried(i)
            ]
        )
        limit = (stage.capacity_bytes - held) / scale.bytes
        model += bytes_ + workspace <= limit, f"memory_{index}"
        floor = stage.workspace_bytes / scale.bytes
        model += workspace >= floor, f"workspace_floor_{index}"
        for (c, k), binary in used.items():
            need = problem.choices[c][k].workspace_bytes / scale.bytes
            model += workspace >= need * binary, f"workspace_{index}_{c}_{k}"
    model += problem.sum_weight * pulp.lpSum(times) + problem.max_weight * tau + rho

    def read() -> Solution | None:
        bounds = [0]
        chosen: list[Choice] = []
        for index in range(len(problem.stages)):
            first, end = next(span for span, y in paths[index].items() if y.value() > 0.5)
            picked = [
                tuple(
                    (k, round(x.value()))
                    for (c, k), x in sorted(mixes[index].items())
                    if c == klass and round(x.value())
                )
                for klass in range(len(problem.choices))
            ]
            chosen += spread(problem, first, end, Mix(0.0, 0.0, tuple(picked)))
            bounds.append(end)
        return _solution(problem, tuple(bounds), tuple(chosen))

    return _run(model, problem, scale, read, time_limit_s)


def _paths(
    model: Any, problem: Problem, bounds: tuple[int, ...] | None
) -> list[dict[tuple[int, int], Any]]:
    """y[s,i,j] with the path constraints."""
    count, layers = len(problem.stages), len(problem.layers)
    paths: list[dict[tuple[int, int], Any]] = []
    for s in range(count):
        spans = [
            (i, j)
            for i in range(s, layers)
            for j in range(i + 1, layers - (count - 1 - s) + 1)
            if (s > 0 or i == 0)
            and (s < count - 1 or j == layers)
            and (bounds is None or (i, j) == (bounds[s], bounds[s + 1]))
        ]
        paths.append({(i, j): model.add_variable(f"y_{s}_{i}_{j}", cat="Binary") for i, j in spans})
    model += pulp.lpSum(paths[0].values()) == 1, "start"
    for s in range(count - 1):
        for position in range(s + 1, layers):
            arriving = [y for (_, j), y in paths[s].items() if j == position]
            leaving = [y for (i, _), y in paths[s + 1].items() if i == position]
            if arriving or leaving:
                model += pulp.lpSum(arriving) == pulp.lpSum(leaving), f"path_{s}_{position}"
    return paths


def _stage_counts(
    model: Any,
    problem: Problem,
    stage: int,
    spans: dict[tuple[int, int], Any],
    counts: list[tuple[int, ...]],
) -> tuple[dict[tuple[int, int], Any], dict[tuple[int, int], Any], Any]:
    """x[s,c,k] and u[s,c,k] with cover constraints, and W_s."""
    mix: dict[tuple[int, int], Any] = {}
    used: dict[tuple[int, int], Any] = {}
    for c, choices in enumerate(problem.choices):
        number = counts[-1][c]
        for k in range(len(choices)):
            mix[c, k] = model.add_variable(f"x_{stage}_{c}_{k}", 0, number, cat="Integer")
            used[c, k] = model.add_variable(f"u_{stage}_{c}_{k}", cat="Binary")
            model += mix[c, k] <= number * used[c, k], f"used_{stage}_{c}_{k}"
        covered = pulp.lpSum((counts[j][c] - counts[i][c]) * y for (i, j), y in spans.items())
        model += pulp.lpSum(mix[c, k] for k in range(len(choices))) == covered, f"cover_{stage}_{c}"
    return mix, used, model.add_variable(f"W_{stage}", 0)


def solve_unfolded(problem: Problem, time_limit_s: float | None = None) -> Answer:
    """The optimum by the unfolded program, one binary per layer, stage and choice."""
    scale = _Scale(problem)
    model = pulp.LpProblem("layers", pulp.LpMinimize)
    count, layers = len(problem.stages), len(problem.layers)
    z = {
        (layer, s, k): model.add_variable(f"z_{layer}_{s}_{k}", cat="Binary")
        for layer in range(layers)
        for s in range(count)
        for k in range(len(problem.choices[problem.layers[layer]]))
    }
    on = {
        (layer, s): pulp.lpSum(
            z[layer, s, k] for k in range(len(problem.choices[problem.layers[layer]]))
        )
        for layer in range(layers)
        for s in range(count)
    }
    for layer in range(layers):
        model += pulp.lpSum(on[layer, s] for s in range(count)) == 1, f"one_{layer}"
    for layer in range(layers - 1):  # contiguous: from stage s a layer's successor is on s or s + 1
        for s in range(count):
            following = on[layer + 1, s] + (on[layer + 1, s + 1] if s + 1 < count else 0)
            model += following >= on[layer, s], f"next_{layer}_{s}"
    model += on[0, 0] == 1, "first"
    model += on[layers - 1, count - 1] == 1, "last"
    cut = {
        (position, s): model.add_variable(f"cut_{position}_{s}", 0, 1)
        for position in range(1, layers)
        for s in range(count - 1)
    }
    for (position, s), crossed in cut.items():  # the cut before `position` ends stage s
        both = on[position - 1, s] + on[position, s + 1]
        model += crossed >= both - 1, f"crossed_{position}_{s}"
    tau, rho = model.add_variable("tau", 0), model.add_variable("rho", 0)
    times = []
    for s, stage in enumerate(problem.stages):
        here = [
            (problem.choices[problem.layers[layer]][k], variable)
            for (layer, at, k), variable in z.items()
            if at == s
        ]
        ends = [(p, crossed) for (p, at), crossed in cut.items() if at == s]
        time_s = stage.time_s / scale.time + pulp.lpSum(
            [choice.time_s / scale.time * variable for choice, variable in here]
            + [problem.cut_time(p) / scale.time * crossed for p, crossed in ends]
        )
        times.append(time_s)
        model += tau >= time_s, f"slowest_{s}"
        step = pulp.lpSum(choice.per_step_s / scale.time * variable for choice, variable in here)
        model += rho >= step + stage.per_step_s / scale.time, f"per_step_{s}"
        starts = [(problem.carried(p), x) for (p, at), x in cut.items() if at == s - 1]
        _memory(model, problem, s, scale, here, starts)
    model += problem.sum_weight * pulp.lpSum(times) + problem.max_weight * tau + rho

    def read() -> Solution | None:
        chosen: list[Choice] = []
        places: list[int] = []
        for layer, klass in enumerate(problem.layers):
            place, k = next(
                (s, k)
                for s in range(count)
                for k in range(len(problem.choices[klass]))
                if z[layer, s, k].value() > 0.5
            )
            places.append(place)
            chosen.append(problem.choices[klass][k])
        bounds = [0, *(i for i in range(1, layers) if places[i] != places[i - 1]), layers]
        return _solution(problem, tuple(bounds), tuple(chosen))

    return _run(model, problem, scale, read, time_limit_s)


def _memory(
    model: Any,
    problem: Problem,
    index: int,
    scale: _Scale,
    here: list[tuple[Choice, Any]],
    starts: list[tuple[float, Any]],
) -> None:
    """W_s and the memory row of a stage of the unfolded program.

    `here` are its choices with their binaries; `starts` the bytes that the cut before it carries,
    with the cut's variable.
    """
    stage = problem.stages[index]
    workspace = model.add_variable(f"W_{index}", stage.workspace_bytes / scale.bytes)
    for at, (choice, variable) in enumerate(here):
        need = choice.workspace_bytes / scale.bytes
        model += workspace >= need * variable, f"workspace_{index}_{at}"
    held = stage.state_bytes + stage.in_flight * stage.activation_bytes
    bytes_ = pulp.lpSum(
        [
            (c.state_bytes + stage.in_flight * c.activation_bytes) / scale.bytes * variable
            for c, variable in here
        ]
        + [stage.in_flight * carried / scale.bytes * x for carried, x in starts]
    )
    model += bytes_ + workspace <= (stage.capacity_bytes - held) / scale.bytes, f"memory_{index}"


def _solution(
    problem: Problem, bounds: tuple[int, ...], chosen: tuple[Choice, ...]
) -> Solution | None:
    objective = evaluate(problem, bounds, chosen)
    if objective is None:
        return None
    return Solution(objective, bounds, chosen, objective)


@contextmanager
def quiet(target: str = "") -> Iterator[None]:
    """HiGHS prints a banner from C++ whatever its options say; standard output is for answers.

    What is printed goes to standard error, or to the file `target`.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    elsewhere = os.open(target, os.O_WRONLY) if target else os.dup(2)
    try:
        os.dup2(elsewhere, 1)
        yield
    finally:
        os.close(elsewhere)
        os.dup2(kept, 1)
        os.close(kept)


def run_highs(model: Any, solver: Any, target: str = "") -> str:
    """Let `solver` (pulp.HiGHS) solve `model`; HiGHS's own word for how that ended.

    HiGHS keeps one pool of threads a process, and refuses another number of them than its first
    user in the process had; then the pool is made anew.
    """
    with quiet(target):
        model.solve(solver)
        if _status(model) == "not set":
            model.solverModel.resetGlobalScheduler(True)
            model.solve(solver)
    return _status(model)


def _status(model: Any) -> str:
    highs = model.solverModel
    return str(highs.modelStatusToString(highs.getModelStatus())).lower()


def _run(
    model: Any, problem: Problem, scale: _Scale, read: Any, time_limit_s: float | None
) -> Answer:
    """Solve, and take status, bound and gap from HiGHS itself."""
    solver = pulp.HiGHS(
        msg=False,
        gapRel=_TOLERANCE,
        gapAbs=0.0,
        threads=1,
        timeLimit=time_limit_s,
        mip_feasibility_tolerance=_TOLERANCE,
        primal_feasibility_tolerance=_TOLERANCE,
    )
    status = run_highs(model, solver)
    highs = model.solverModel
    info = highs.getInfo()
    # PuLP keeps the objective's constant to itself
    bound = (float(info.mip_dual_bound) + model.objective.constant) * scale.time
    bound += problem.constant_s
    found = read() if info.primal_solution_status == 2 else None
    return Answer(found, status, bound, float(info.mip_gap))

"""The exact optimum of a stage problem by decomposition: mixes inside stages, a path over cuts.

The objective rises with every T_s and R_s, so an optimal plan uses, in each stage, a mix on that
stage's (T, R) Pareto frontier (:mod:`ds_autoplan.search.mix`). What is left is a path from position
0 to L in P steps. A partial path is a label (sum T, max T, max R); a label that another one at the
same place equals or beats in all three can go, and so can one whose bound is no better than the
incumbent:

    sum_weight * (sum T + least sum of the rest) + max_weight * max(max T, least maximum of the
    rest)
        + max R + constant >= incumbent

Both terms of the rest are exact by themselves (:mod:`ds_autoplan.search.stages`), so few labels
survive. The incumbent comes from :mod:`ds_autoplan.search.heuristic` or from other candidates.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ds_autoplan.search.heuristic import spread
from ds_autoplan.search.mix import Mix
from ds_autoplan.search.problem import Choice, Problem, Solution, evaluate, lower_bound
from ds_autoplan.search.stages import Stages


@dataclass(frozen=True)
class _Label:
    total_s: float
    longest_s: float
    per_step_s: float
    end: int
    mix: Mix
    before: _Label | None


def solve_exact(
    problem: Problem,
    start: Solution | None,
    deadline: float | None = None,
    limit_s: float = float("inf"),
    prove_below_s: float = float("inf"),
    bounds: tuple[int, ...] | None = None,
) -> Solution | None:
    """The optimum, or None where nothing fits or nothing is faster than `limit_s`.

    Args:
        problem: the stage problem.
        start: an incumbent, for pruning; returned where nothing better exists.
        deadline: `time.monotonic()` after which the search stops with the best so far.
        limit_s: solutions that are not faster than this are of no interest.
        prove_below_s: an optimum that is not faster than this need not be proved; what is returned
            then states its own bound.
        bounds: the cut, where it is given.
    """
    if start is not None and start.objective_s >= limit_s:
        start = None
    incumbent = start.objective_s if start else limit_s
    stages = Stages(problem, incumbent, bounds)
    found = _path(stages, deadline)
    if found.label is not None:
        start = _unfold(problem, found.label, found.nodes)
    if found.stopped:
        return _stopped(problem, start, found.nodes)
    if stages.whole:
        return _proved(start, found.nodes)
    incumbent = min(start.objective_s if start else limit_s, prove_below_s)
    stages = Stages(problem, incumbent, bounds, stages.value_limits(incumbent))
    found = _path(stages, deadline)
    if found.stopped:
        return _stopped(problem, start, found.nodes)
    if found.label is not None:
        return _proved(_unfold(problem, found.label, found.nodes), found.nodes)
    if start is None or start.objective_s <= prove_below_s:
        return _proved(start, found.nodes)
    return replace(start, bound_s=prove_below_s, status="bounded", nodes=found.nodes)


@dataclass(frozen=True)
class _Found:
    """The last label of the best path that beats the incumbent, if there is one."""

    label: _Label | None
    nodes: int = 0
    stopped: bool = False


def _path(stages: Stages, deadline: float | None) -> _Found:
    """The best path over cuts, stage by stage, that beats the incumbent of `stages`."""
    if stages.windows is None or stages.bound_s >= stages.incumbent_s:
        return _Found(None)
    frontier: dict[int, list[_Label | None]] = {0: [None]}
    nodes = 0
    for stage in range(len(stages.problem.stages)):
        reached: dict[int, list[_Label]] = {}
        rest = stages.rest_sum_s[stage + 1]
        low, high = stages.windows[stage + 1]
        for first in sorted(frontier):
            for end in range(max(first + 1, low), high + 1):
                if end not in rest:
                    continue
                if stages.hopeless(stage, first, end):
                    break
                for mix in stages.options(stage, first, end):
                    nodes += 1
                    for before in frontier[first]:
                        label = _extend(stages, stage, end, mix, before)
                        if label is not None:
                            _keep(label, reached.setdefault(end, []))
            if deadline is not None and time.monotonic() > deadline:
                return _Found(None, nodes, stopped=True)
        frontier = {end: list(labels) for end, labels in reached.items()}
        if not frontier:
            return _Found(None, nodes)
    labels = [label for label in frontier.get(len(stages.problem.layers), []) if label is not None]
    best = min(labels, key=lambda label: _objective(stages.problem, label), default=None)
    if best is None or _objective(stages.problem, best) >= stages.incumbent_s:
        return _Found(None, nodes)
    return _Found(best, nodes)


def _objective(problem: Problem, label: _Label) -> float:
    return (
        problem.sum_weight * label.total_s
        + problem.max_weight * label.longest_s
        + label.per_step_s
        + problem.constant_s
    )


def _extend(stages: Stages, stage: int, end: int, mix: Mix, before: _Label | None) -> _Label | None:
    """`before` and one more stage, unless its bound is no better than the incumbent."""
    total = longest = stages.fixed_s(stage, end) + mix.time_s
    per_step = stages.problem.stages[stage].per_step_s + mix.per_step_s
    if before is not None:
        total += before.total_s
        longest = max(before.longest_s, longest)
        per_step = max(before.per_step_s, per_step)
    bound = stages.bound(
        total + stages.rest_sum_s[stage + 1][end],
        max(longest, stages.rest_longest_s[stage + 1][end]),
        per_step,
    )
    if bound >= stages.incumbent_s:
        return None
    return _Label(total, longest, per_step, end, mix, before)


def _keep(label: _Label, labels: list[_Label]) -> None:
    """Add `label` to the labels of its position, unless one is as good; drop those it beats."""
    total, longest, per_step = label.total_s, label.longest_s, label.per_step_s
    for other in labels:
        if other.total_s <= total and other.longest_s <= longest and other.per_step_s <= per_step:
            return
    labels[:] = [
        other
        for other in labels
        if other.total_s < total or other.longest_s < longest or other.per_step_s < per_step
    ]
    labels.append(label)


def _unfold(problem: Problem, label: _Label, nodes: int) -> Solution:
    """From the last label back to bounds and a choice for each layer."""
    chain: list[_Label] = []
    at: _Label | None = label
    while at is not None:
        chain.append(at)
        at = at.before
    chain.reverse()
    bounds = [0]
    chosen: list[Choice] = []
    for part in chain:
        chosen += spread(problem, bounds[-1], part.end, part.mix)
        bounds.append(part.end)
    objective = evaluate(problem, tuple(bounds), tuple(chosen))
    if objective is None:
        raise AssertionError("the decomposition returned a stage that does not fit")
    return Solution(objective, tuple(bounds), tuple(chosen), objective, nodes=nodes)


def _proved(start: Solution | None, nodes: int = 0) -> Solution | None:
    """Nothing beats the start: it is the optimum."""
    if start is None:
        return None
    return Solution(start.objective_s, start.bounds, start.chosen, start.objective_s, nodes=nodes)


def _stopped(problem: Problem, start: Solution | None, nodes: int) -> Solution | None:
    if start is None:
        return None
    bound = min(lower_bound(problem), start.objective_s)
    return Solution(start.objective_s, start.bounds, start.chosen, bound, "time limit", nodes)

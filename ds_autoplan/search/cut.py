"""The exact optimum of a stage problem by decomposition: mixes inside stages, a path over cuts.

The objective rises with every T_s and R_s, so an optimal plan uses, in each stage, a mix on that
stage's (T, R) Pareto frontier (:mod:`ds_autoplan.search.mix`). What is left is a path from position
0 to L in P steps. A partial path is a label (sum T, max T, max R); a label that another one at the
same place equals or beats in all three can go, and so can one whose bound is no better than the
incumbent:

    sum_weight * (sum T + least time of the rest) + max_weight * max(max T, rest / stages left)
        + max R + constant >= incumbent

The same bound limits each stage's time before any label exists, so only cuts near the balanced one
are ever looked at. The incumbent comes from :mod:`ds_autoplan.search.heuristic`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ds_autoplan.search.heuristic import spread
from ds_autoplan.search.mix import Mix, Mixer, Room
from ds_autoplan.search.problem import (
    Choice,
    Problem,
    Solution,
    evaluate,
    fastest_times,
    lower_bound,
    prefix_counts,
)

_RELATIVE = 1e-12


@dataclass(frozen=True)
class _Label:
    total_s: float
    longest_s: float
    per_step_s: float
    end: int
    mix: Mix
    before: _Label | None


@dataclass(frozen=True)
class _Step:
    """One stage to add: its end, mix, T_s without layers, and the least time of what is left."""

    stage: int
    end: int
    mix: Mix
    fixed_s: float
    rest_s: float


class _Stages:
    """Stage options on demand, each distinct stage content solved once."""

    def __init__(self, problem: Problem, incumbent_s: float) -> None:
        self.problem = problem
        self.counts = prefix_counts(problem)
        self.mixer = Mixer(problem.choices)
        self.memo: dict[object, list[Mix]] = {}
        self.least_bytes: dict[tuple[int, float], float] = {}
        fastest = fastest_times(problem)
        self.layer_s = [fastest[layer] for layer in problem.layers]
        self.prefix_s = [0.0]
        for seconds in self.layer_s:
            self.prefix_s.append(self.prefix_s[-1] + seconds)
        stages, last = problem.stages, len(problem.stages) - 1
        cuts = problem.cut_time_s[1:]
        self.least_cut_s = min(cuts) if cuts and last > 0 else 0.0
        self.rest_fixed_s = [0.0] * (last + 2)
        for stage in range(last, -1, -1):
            own = stages[stage].time_s + (self.least_cut_s if stage < last else 0.0)
            self.rest_fixed_s[stage] = self.rest_fixed_s[stage + 1] + own
        per_step = [min(c.per_step_s for c in choices) for choices in problem.choices]
        total = sum(per_step[layer] for layer in problem.layers)
        total += sum(stage.per_step_s for stage in stages)
        self.per_step_floor_s = total / (last + 1)
        least = self.prefix_s[-1] + self.rest_fixed_s[0]
        spare = incumbent_s - problem.constant_s - self.per_step_floor_s
        spare -= problem.sum_weight * least
        if problem.max_weight > 0:
            self.longest_s = spare / problem.max_weight
        else:
            self.longest_s = least + spare / problem.sum_weight
        self.longest_s *= 1 + _RELATIVE

    def rest_s(self, stage: int, position: int) -> float:
        """Least summed time of the stages from `stage` on, for the layers from `position` on."""
        return self.prefix_s[-1] - self.prefix_s[position] + self.rest_fixed_s[stage]

    def fixed_s(self, stage: int, end: int) -> float:
        """T_s without its layers."""
        cut = self.problem.cut_time(end) if end < len(self.problem.layers) else 0.0
        return self.problem.stages[stage].time_s + cut

    def hopeless(self, stage: int, first: int, end: int) -> bool:
        """No mix of these layers, nor of these and more, can fit or be fast enough."""
        own = self.problem.stages[stage]
        if self.prefix_s[end] - self.prefix_s[first] + own.time_s > self.longest_s:
            return True
        kept = own.activation_bytes + self.problem.carried(first)
        budget = own.capacity_bytes - own.state_bytes - own.in_flight * kept
        least = own.workspace_bytes
        for klass, (after, before) in enumerate(
            zip(self.counts[end], self.counts[first], strict=True)
        ):
            if after > before:
                least += (after - before) * self._least_bytes(klass, own.in_flight)
        return least > budget * (1 + _RELATIVE)

    def _least_bytes(self, klass: int, in_flight: float) -> float:
        key = (klass, in_flight)
        if key not in self.least_bytes:
            self.least_bytes[key] = min(
                choice.state_bytes + in_flight * choice.activation_bytes
                for choice in self.problem.choices[klass]
            )
        return self.least_bytes[key]

    def options(self, stage: int, first: int, end: int) -> list[Mix]:
        """The Pareto mixes of layers first..end-1 on `stage` that can beat the incumbent."""
        own = self.problem.stages[stage]
        least = self.prefix_s[end] - self.prefix_s[first]
        limit = self.longest_s - self.fixed_s(stage, end)
        if least > limit:
            return []
        counts = tuple(
            after - before
            for after, before in zip(self.counts[end], self.counts[first], strict=True)
        )
        kept = own.activation_bytes + self.problem.carried(first)
        budget = own.capacity_bytes - own.state_bytes - own.in_flight * kept
        floor = self.per_step_floor_s - own.per_step_s
        key = (counts, own.in_flight, budget, own.workspace_bytes, floor, limit)
        if key not in self.memo:
            self.memo[key] = self.mixer.frontier(
                counts, Room(own.in_flight, budget, own.workspace_bytes), limit, floor
            )
        return self.memo[key]


def solve_exact(
    problem: Problem,
    start: Solution | None,
    deadline: float | None = None,
    limit_s: float = float("inf"),
) -> Solution | None:
    """The optimum, or None where nothing fits or nothing is faster than `limit_s`.

    Args:
        problem: the stage problem.
        start: an incumbent, for pruning; returned where nothing better exists.
        deadline: `time.monotonic()` after which the search stops with the best so far.
        limit_s: solutions that are not faster than this are of no interest.
    """
    if start is not None and start.objective_s >= limit_s:
        start = None
    incumbent = start.objective_s if start else limit_s
    stages = _Stages(problem, incumbent)
    windows = _windows(stages)
    if windows is None:
        return _proved(start)
    last = len(problem.stages) - 1
    frontier: dict[int, list[_Label | None]] = {0: [None]}
    reached: dict[int, list[_Label]] = {}
    nodes = 0
    for stage in range(last + 1):
        reached = {}
        low, high = windows[stage + 1]
        for first in sorted(frontier):
            for end in range(max(first + 1, low), high + 1):
                if stages.hopeless(stage, first, end):
                    break
                if stage == last and end != len(problem.layers):
                    continue
                fixed, rest = stages.fixed_s(stage, end), stages.rest_s(stage + 1, end)
                for mix in stages.options(stage, first, end):
                    nodes += 1
                    into = reached.setdefault(end, [])
                    _extend(
                        problem,
                        frontier[first],
                        into,
                        _Step(stage, end, mix, fixed, rest),
                        incumbent,
                    )
            if deadline is not None and time.monotonic() > deadline:
                return _stopped(problem, start, nodes)
        frontier = {end: list(labels) for end, labels in reached.items() if labels}
        if not frontier:
            return _proved(start, nodes)
    labels = reached.get(len(problem.layers), [])
    best = min(labels, key=lambda label: _objective(problem, label), default=None)
    if best is None or _objective(problem, best) >= incumbent:
        return _proved(start, nodes)
    return _unfold(problem, best, nodes)


def _objective(problem: Problem, label: _Label) -> float:
    return (
        problem.sum_weight * label.total_s
        + problem.max_weight * label.longest_s
        + label.per_step_s
        + problem.constant_s
    )


def _windows(stages: _Stages) -> list[tuple[int, int]] | None:
    """For each stage the positions where it may start, from the limit on a stage's time."""
    count, layers = len(stages.problem.stages), len(stages.layer_s)

    def fits(stage: int, first: int, end: int) -> bool:
        least = stages.prefix_s[end] - stages.prefix_s[first]
        return least + stages.problem.stages[stage].time_s <= stages.longest_s

    high = [0]
    for stage in range(count):
        end, furthest = high[stage], layers - (count - 1 - stage)
        while end < furthest and fits(stage, high[stage], end + 1):
            end += 1
        if end == high[stage]:
            return None
        high.append(end)
    if high[count] < layers:
        return None
    low = [layers] * (count + 1)
    low[0] = 0
    for stage in range(count - 1, 0, -1):
        end = low[stage + 1]
        first = end - 1
        while first > stage and fits(stage, first - 1, end):
            first -= 1
        low[stage] = first
    return list(zip(low, high, strict=True))


def _extend(
    problem: Problem,
    labels: list[_Label | None],
    into: list[_Label],
    step: _Step,
    incumbent: float,
) -> None:
    """Add a stage to each label, keep what the bound and dominance leave."""
    left = len(problem.stages) - 1 - step.stage
    rest = step.rest_s
    own_s = step.fixed_s + step.mix.time_s
    own_step = problem.stages[step.stage].per_step_s + step.mix.per_step_s
    for before in labels:
        if before is None:
            total, longest, per_step = own_s, own_s, own_step
        else:
            total = before.total_s + own_s
            longest = max(before.longest_s, own_s)
            per_step = max(before.per_step_s, own_step)
        balanced = max(longest, rest / left) if left else longest
        bound = (
            problem.sum_weight * (total + rest)
            + problem.max_weight * balanced
            + per_step
            + problem.constant_s
        )
        if bound >= incumbent:
            continue
        if any(
            other.total_s <= total and other.longest_s <= longest and other.per_step_s <= per_step
            for other in into
        ):
            continue
        into[:] = [
            other
            for other in into
            if other.total_s < total or other.longest_s < longest or other.per_step_s < per_step
        ]
        into.append(_Label(total, longest, per_step, step.end, step.mix, before))


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

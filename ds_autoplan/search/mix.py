"""The fastest mix of choices for one stage: how many of its layers of each class take which choice.

For a stage with n_c layers of class c, over counts x_ck >= 0 with sum_k x_ck = n_c:

    minimise   T = sum x_ck * time_ck
    subject to sum x_ck * (state_ck + in_flight * activation_ck) + max workspace <= budget
               sum x_ck * per_step_ck <= per_step limit

Identical layers are interchangeable, so counts say everything. The workspace maximum is linearised
by trying each workspace value as the cap. Each case is a multiple-choice knapsack with counts,
solved by branch and bound on its linear relaxation (greedy along each class's convex hull), so the
answer is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_autoplan.search.problem import Choice

_RELATIVE = 1e-12  # rounding allowance of sums, far below the 1e-6 that optima are compared at


@dataclass(frozen=True)
class Mix:
    """Counts per class and choice (indices into the class's choices), with their totals."""

    time_s: float
    per_step_s: float
    counts: tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class _Item:
    """A choice inside one stage: `index` into the class, `cost` its bytes there."""

    index: int
    time_s: float
    cost: float
    per_step_s: float
    workspace: float


@dataclass
class _Best:
    time_s: float
    per_step_s: float = 0.0
    picked: tuple[tuple[int, int, int], ...] | None = None


def fastest_mix(
    choices: tuple[tuple[Choice, ...], ...],
    counts: tuple[int, ...],
    in_flight: float,
    budget: float,
    workspace_floor: float,
    time_limit_s: float = float("inf"),
    per_step_limit_s: float = float("inf"),
) -> Mix | None:
    """The fastest feasible mix, or None if nothing fits (or nothing is faster than the limit).

    Args:
        choices: every class's choices.
        counts: layers of each class in the stage.
        in_flight: micro-batches whose activations the stage keeps.
        budget: bytes for the layers and the workspace.
        workspace_floor: workspace that the stage needs whatever its layers choose.
        time_limit_s: only mixes at most this slow are of interest.
        per_step_limit_s: limit on the layers' summed `per_step_s`.
    """
    groups = [
        (klass, count, _items(choices[klass], in_flight))
        for klass, count in enumerate(counts)
        if count
    ]
    fast = _uniform(groups, budget, workspace_floor, per_step_limit_s)
    if fast is not None:
        return fast if fast.time_s <= time_limit_s * (1 + _RELATIVE) else None
    best = _Best(time_limit_s * (1 + _RELATIVE))
    caps = sorted({max(workspace_floor, item.workspace) for g in groups for item in g[2]})
    for cap in caps:
        allowed = []
        for klass, count, items in groups:
            fitting = [item for item in items if item.workspace <= cap]
            if not fitting:
                break
            allowed.append((klass, count, _reduce(fitting, per_step_limit_s)))
        else:
            _branch(allowed, budget - cap, per_step_limit_s, best)
    if best.picked is None:
        return None
    per_class: list[list[tuple[int, int]]] = [[] for _ in counts]
    for klass, index, count in best.picked:
        per_class[klass].append((index, count))
    return Mix(best.time_s, best.per_step_s, tuple(tuple(sorted(part)) for part in per_class))


def _items(choices: tuple[Choice, ...], in_flight: float) -> list[_Item]:
    return [
        _Item(
            index,
            choice.time_s,
            choice.state_bytes + in_flight * choice.activation_bytes,
            choice.per_step_s,
            choice.workspace_bytes,
        )
        for index, choice in enumerate(choices)
    ]


_Groups = list[tuple[int, int, list[_Item]]]


def _uniform(groups: _Groups, budget: float, floor: float, per_step_limit_s: float) -> Mix | None:
    """Every class at its fastest choice, if that fits: then nothing else needs a look."""
    time_s = per_step = cost = 0.0
    workspace = floor
    counts: list[tuple[tuple[int, int], ...]] = []
    for klass, count, items in groups:
        item = min(items, key=lambda i: (i.time_s, i.per_step_s, i.cost, i.index))
        time_s += count * item.time_s
        per_step += count * item.per_step_s
        cost += count * item.cost
        workspace = max(workspace, item.workspace)
        counts += [()] * (klass - len(counts))
        counts.append(((item.index, count),))
    if cost + workspace > budget * (1 + _RELATIVE) or per_step > per_step_limit_s:
        return None
    return Mix(time_s, per_step, tuple(counts))


def _reduce(items: list[_Item], per_step_limit_s: float) -> list[_Item]:
    """Items that no other dominates in time, bytes and (where it is limited) per-step time."""
    limited = per_step_limit_s != float("inf")
    kept: list[_Item] = []
    for item in sorted(items, key=lambda i: (i.time_s, i.cost, i.per_step_s, i.index)):
        if not any(
            other.cost <= item.cost and (not limited or other.per_step_s <= item.per_step_s)
            for other in kept
        ):
            kept.append(item)
    return kept


def _hull(items: list[_Item]) -> list[_Item]:
    """Lower convex hull in (cost, time), cheapest in bytes first."""
    ordered = sorted(items, key=lambda i: (i.cost, i.time_s))
    hull: list[_Item] = []
    for item in ordered:
        if hull and item.time_s >= hull[-1].time_s:
            continue
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (b.time_s - a.time_s) * (item.cost - a.cost) >= (item.time_s - a.time_s) * (
                b.cost - a.cost
            ):
                hull.pop()
            else:
                break
        hull.append(item)
    return hull


class _Relaxation:
    """Linear relaxation of the remaining groups: time as a function of the budget."""

    def __init__(self, groups: _Groups) -> None:
        self.least_cost = self.most_time = 0.0
        self.least_per_step = 0.0
        steps: list[tuple[float, float, float]] = []
        for _, count, items in groups:
            hull = _hull(items)
            self.least_cost += count * hull[0].cost
            self.most_time += count * hull[0].time_s
            self.least_per_step += count * min(item.per_step_s for item in items)
            for before, after in zip(hull, hull[1:], strict=False):
                gain, price = before.time_s - after.time_s, after.cost - before.cost
                steps.append((gain / price, count * gain, count * price))
        self.steps = sorted(steps, key=lambda step: -step[0])

    def time(self, budget: float) -> float | None:
        """Least time at most `budget` bytes allow, fractions allowed; None if nothing fits."""
        left = budget - self.least_cost
        if left < -_RELATIVE * max(abs(budget), abs(self.least_cost)):
            return None
        time_s = self.most_time
        for rate, gain, price in self.steps:
            if price <= left:
                time_s -= gain
                left -= price
            else:
                time_s -= rate * max(left, 0.0)
                break
        return time_s


def _branch(groups: _Groups, budget: float, per_step_limit_s: float, best: _Best) -> None:
    """Depth first over (class, choice) counts; the relaxation of what is left prunes."""
    levels: list[tuple[int, _Item, bool]] = []
    for klass, _, items in groups:
        levels += [(klass, item, index == len(items) - 1) for index, item in enumerate(items)]
    relaxations: dict[tuple[int, int], _Relaxation] = {}
    starts: dict[int, int] = {}
    for position, (klass, _, _) in enumerate(levels):
        starts.setdefault(klass, position)
    order = [klass for klass, _, _ in groups]
    count_of = {klass: count for klass, count, _ in groups}
    items_of = {klass: items for klass, _, items in groups}

    def rest(level: int, left: int) -> _Relaxation:
        key = (level, left)
        if key not in relaxations:
            remaining: _Groups = []
            if level < len(levels):
                klass = levels[level][0]
                tail = items_of[klass][level - starts[klass] :]
                if left:
                    remaining.append((klass, left, tail))
                for other in order[order.index(klass) + 1 :]:
                    remaining.append((other, count_of[other], items_of[other]))
            relaxations[key] = _Relaxation(remaining)
        return relaxations[key]

    def visit(
        level: int,
        left: int,
        time_s: float,
        per_step: float,
        budget_left: float,
        picked: tuple[tuple[int, int, int], ...],
    ) -> None:
        if level == len(levels):
            fits = budget_left >= -_RELATIVE * abs(budget)
            if fits and time_s < best.time_s and per_step <= per_step_limit_s:
                best.time_s, best.per_step_s, best.picked = time_s, per_step, picked
            return
        klass, item, last = levels[level]
        for count in _counts(left, last):
            after = left - count
            used = budget_left - count * item.cost
            spent = time_s + count * item.time_s
            stepped = per_step + count * item.per_step_s
            if last and level + 1 < len(levels):
                after = count_of[levels[level + 1][0]]
            relaxed = rest(level + 1, after)
            if stepped + relaxed.least_per_step > per_step_limit_s:
                continue
            more = relaxed.time(used)
            if more is None or (spent + more) * (1 + _RELATIVE) >= best.time_s:
                continue
            grown = (*picked, (klass, item.index, count)) if count else picked
            visit(level + 1, after, spent, stepped, used, grown)

    if levels:
        visit(0, count_of[levels[0][0]], 0.0, 0.0, budget, ())


def _counts(left: int, last: bool) -> Iterator[int]:
    """Counts to try: all that is left for a class's last choice, else from all down to none."""
    if last:
        yield left
    else:
        yield from range(left, -1, -1)


def mixes_by_per_step(
    choices: tuple[tuple[Choice, ...], ...],
    counts: tuple[int, ...],
    in_flight: float,
    budget: float,
    workspace_floor: float,
    time_limit_s: float,
    per_step_floor_s: float,
) -> list[Mix]:
    """The Pareto frontier (time, per-step time) of a stage's mixes, fastest first.

    Mixes whose per-step time is below `per_step_floor_s` gain nothing over one that reaches it,
    because the slowest stage counts, so the frontier ends there.
    """
    frontier: list[Mix] = []
    limit = float("inf")
    while True:
        mix = fastest_mix(choices, counts, in_flight, budget, workspace_floor, time_limit_s, limit)
        if mix is None:
            return frontier
        frontier.append(mix)
        least = sum(
            count * min(choice.per_step_s for choice in choices[klass])
            for klass, count in enumerate(counts)
            if count
        )
        if mix.per_step_s <= max(least, per_step_floor_s) * (1 + _RELATIVE):
            return frontier
        limit = mix.per_step_s * (1 - 1e-9)

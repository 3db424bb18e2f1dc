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

from ds_autoplan.search.problem import Choice, Problem

_RELATIVE = 1e-12  # rounding allowance of sums, far below the 1e-6 that optima are compared at


_INFINITY = float("inf")


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


@dataclass(frozen=True)
class Room:
    """What one stage offers its layers: `budget` bytes for them and the workspace."""

    in_flight: float
    budget: float
    workspace_floor: float


def room_of(problem: Problem, stage: int, carried: float) -> Room:
    """What `stage` offers its layers where the cut before it carries that many bytes."""
    own = problem.stages[stage]
    kept = own.activation_bytes + carried
    budget = own.capacity_bytes - own.state_bytes - own.in_flight * kept
    return Room(own.in_flight, budget, own.workspace_bytes)


class Mixer:
    """Fastest mixes of one problem's choices; what does not depend on the counts is kept."""

    def __init__(self, choices: tuple[tuple[Choice, ...], ...]) -> None:
        """Keep the choices of every class."""
        self.choices = choices
        self._of_class: dict[tuple[int, float], list[_Item]] = {}
        self._levels: dict[object, list[_Level] | None] = {}

    def fastest(
        self,
        counts: tuple[int, ...],
        room: Room,
        time_limit_s: float = _INFINITY,
        per_step_limit_s: float = _INFINITY,
    ) -> Mix | None:
        """The fastest feasible mix, or None if nothing fits (or nothing is faster than the limit).

        Args:
            counts: layers of each class in the stage.
            room: what the stage offers.
            time_limit_s: only mixes at most this slow are of interest.
            per_step_limit_s: limit on the layers' summed `per_step_s`.
        """
        groups = self._groups(counts, room)
        fast = _uniform(groups, room, per_step_limit_s)
        if fast is not None:
            return fast if fast.time_s <= time_limit_s * (1 + _RELATIVE) else None
        best = _Best(time_limit_s * (1 + _RELATIVE))
        for cap, levels in self._capped(groups, room, per_step_limit_s < _INFINITY):
            _branch(levels, groups[0][1], room.budget - cap, per_step_limit_s, best)
        if best.picked is None:
            return None
        per_class: list[list[tuple[int, int]]] = [[] for _ in counts]
        for klass, index, count in best.picked:
            per_class[klass].append((index, count))
        return Mix(best.time_s, best.per_step_s, tuple(tuple(sorted(p)) for p in per_class))

    def frontier(
        self,
        counts: tuple[int, ...],
        room: Room,
        time_limit_s: float,
        per_step_floor_s: float,
    ) -> list[Mix]:
        """The Pareto frontier (time, per-step time) of a stage's mixes, fastest first.

        Mixes whose per-step time is below `per_step_floor_s` gain nothing over one that reaches it,
        because the slowest stage counts, so the frontier ends there.
        """
        found: list[Mix] = []
        limit = _INFINITY
        least = sum(
            count * min(choice.per_step_s for choice in self.choices[klass])
            for klass, count in enumerate(counts)
            if count
        )
        while True:
            mix = self.fastest(counts, room, time_limit_s, limit)
            if mix is None:
                return found
            found.append(mix)
            if mix.per_step_s <= max(least, per_step_floor_s) * (1 + _RELATIVE):
                return found
            limit = mix.per_step_s * (1 - 1e-9)

    def relaxed_s(self, counts: tuple[int, ...], room: Room) -> float:
        """A lower bound on :meth:`fastest`'s time, fractions allowed; infinite: nothing fits."""
        groups = self._groups(counts, room)
        least = _INFINITY
        for cap, levels in self._capped(groups, room):
            bound = levels[0].bound(groups[0][1], room.budget - cap)
            if bound is not None:
                least = min(least, bound)
        return least

    def fits(self, counts: tuple[int, ...], room: Room) -> bool:
        """Whether any mix fits."""
        groups = self._groups(counts, room)
        for cap, levels in self._capped(groups, room):
            first = levels[0]
            need = groups[0][1] * first.base_cost + first.later_cost
            if need <= room.budget - cap + _RELATIVE * abs(room.budget):
                return True
        return False

    def _groups(self, counts: tuple[int, ...], room: Room) -> _Groups:
        return [
            (klass, count, self._items(klass, room.in_flight))
            for klass, count in enumerate(counts)
            if count
        ]

    def _capped(
        self, groups: _Groups, room: Room, limited: bool = False
    ) -> Iterator[tuple[float, list[_Level]]]:
        """(workspace cap, levels) for every cap under which all classes have a choice."""
        for cap in sorted({max(room.workspace_floor, i.workspace) for g in groups for i in g[2]}):
            levels = self._levels_of(groups, cap, room.in_flight, limited)
            if levels:
                yield cap, levels

    def _items(self, klass: int, in_flight: float) -> list[_Item]:
        key = (klass, in_flight)
        if key not in self._of_class:
            self._of_class[key] = [
                _Item(
                    index,
                    choice.time_s,
                    choice.state_bytes + in_flight * choice.activation_bytes,
                    choice.per_step_s,
                    choice.workspace_bytes,
                )
                for index, choice in enumerate(self.choices[klass])
            ]
        return self._of_class[key]

    def _levels_of(
        self, groups: _Groups, cap: float, in_flight: float, limited: bool
    ) -> list[_Level] | None:
        """Levels for a workspace cap; None where some class has no choice below it."""
        # the first class's count is the search's own argument, so one class needs one entry only
        contents = tuple((klass, count if at else 0) for at, (klass, count, _) in enumerate(groups))
        key = (contents, cap, in_flight, limited)
        if key not in self._levels:
            allowed: _Groups = []
            for klass, count, items in groups:
                fitting = [item for item in items if item.workspace <= cap]
                if fitting:
                    allowed.append((klass, count, _reduce(fitting, limited)))
            self._levels[key] = _levels(allowed) if len(allowed) == len(groups) else None
        return self._levels[key]


_Groups = list[tuple[int, int, list[_Item]]]


def _uniform(groups: _Groups, room: Room, per_step_limit_s: float) -> Mix | None:
    """Every class at its fastest choice, if that fits: then nothing else needs a look."""
    time_s = per_step = cost = 0.0
    workspace = room.workspace_floor
    counts: list[tuple[tuple[int, int], ...]] = []
    for klass, count, items in groups:
        item = min(items, key=lambda i: (i.time_s, i.per_step_s, i.cost, i.index))
        time_s += count * item.time_s
        per_step += count * item.per_step_s
        cost += count * item.cost
        workspace = max(workspace, item.workspace)
        counts += [()] * (klass - len(counts))
        counts.append(((item.index, count),))
    if cost + workspace > room.budget * (1 + _RELATIVE) or per_step > per_step_limit_s:
        return None
    return Mix(time_s, per_step, tuple(counts))


def _reduce(items: list[_Item], limited: bool) -> list[_Item]:
    """Items that no other dominates in time, bytes and (where it is limited) per-step time."""
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


@dataclass(frozen=True)
class _Level:
    """One decision: how many of what is left of a class take `item`.

    `base_*` are per layer of the class's items from here on (all at their cheapest), `later_*` sums
    over the classes after it. `segments` are the hull edges of both, most time saved per byte
    first: (rate, time saved, bytes, whether per layer left).
    """

    klass: int
    item: _Item
    last: bool
    count: int
    base_cost: float
    base_time: float
    base_per_step: float
    later_cost: float
    later_time: float
    later_per_step: float
    segments: tuple[tuple[float, float, float, bool], ...]
    edges: int

    def bound(self, left: int, budget: float) -> float | None:
        """Least time of this level and all after it, fractions allowed; None if nothing fits."""
        room = budget - left * self.base_cost - self.later_cost
        if room < 0 and room < -_RELATIVE * max(abs(budget), left * self.base_cost):
            return None
        time_s = left * self.base_time + self.later_time
        for rate, gain, price, scaled in self.segments:
            if scaled:
                gain, price = gain * left, price * left
            if price <= room:
                time_s -= gain
                room -= price
            else:
                return time_s - rate * max(room, 0.0)
        return time_s

    def relaxed_count(self, left: int, budget: float) -> int:
        """How many of `left` take `item` in the relaxation, rounded down.

        `item` is the fastest, so it is reached by the last hull edge of its class.
        """
        room = budget - left * self.base_cost - self.later_cost
        edges = self.edges
        for _, _, price, scaled in self.segments:
            if scaled:
                edges -= 1
                price *= left
            if price > room:
                share = max(room, 0.0) / price if scaled and edges == 0 else 0.0
                return int(left * share)
            room -= price
            if scaled and edges == 0:
                return left
        return left


def _levels(groups: _Groups) -> list[_Level]:
    levels: list[_Level] = []
    later: list[tuple[float, float, float, bool]] = []
    later_cost = later_time = later_per_step = 0.0
    for klass, count, items in reversed(groups):
        for start in range(len(items) - 1, -1, -1):
            hull = _hull(items[start:])
            own = [
                (
                    (a.time_s - b.time_s) / (b.cost - a.cost),
                    a.time_s - b.time_s,
                    b.cost - a.cost,
                    True,
                )
                for a, b in zip(hull, hull[1:], strict=False)
            ]
            levels.append(
                _Level(
                    klass,
                    items[start],
                    start == len(items) - 1,
                    count,
                    hull[0].cost,
                    hull[0].time_s,
                    min(item.per_step_s for item in items[start:]),
                    later_cost,
                    later_time,
                    later_per_step,
                    tuple(sorted([*own, *later], key=lambda segment: -segment[0])),
                    len(own),
                )
            )
        first = levels[-1]
        later = [
            (rate, gain * count, price * count, False) if scaled else (rate, gain, price, False)
            for rate, gain, price, scaled in first.segments
        ]
        later_cost += count * first.base_cost
        later_time += count * first.base_time
        later_per_step += count * first.base_per_step
    levels.reverse()
    return levels


def _branch(
    levels: list[_Level], first_count: int, budget: float, per_step_limit_s: float, best: _Best
) -> None:
    """Depth first over (class, choice) counts; the relaxation of what is left prunes.

    The relaxed time is convex in a level's count, so counts are tried from the relaxed one outward
    and each side ends at the first count that cannot win.
    """
    slack = -_RELATIVE * abs(budget)

    def visit(
        at: int,
        left: int,
        time_s: float,
        per_step: float,
        room: float,
        picked: tuple[tuple[int, int, int], ...],
    ) -> None:
        if at == len(levels):
            if room >= slack and time_s < best.time_s and per_step <= per_step_limit_s:
                best.time_s, best.per_step_s, best.picked = time_s, per_step, picked
            return
        level = levels[at]
        following = levels[at + 1] if at + 1 < len(levels) else None

        def bound(count: int) -> float | None:
            rest = room - count * level.item.cost
            spent = time_s + count * level.item.time_s
            if following is None:
                return spent if rest >= slack else None
            after = following.count if level.last else left - count
            more = following.bound(after, rest)
            return None if more is None else spent + more

        def descend(count: int) -> bool:
            """Visit one count; False where it and all further out cannot win."""
            relaxed = bound(count)
            if relaxed is None or relaxed * (1 + _RELATIVE) >= best.time_s:
                return False
            stepped = per_step + count * level.item.per_step_s
            after = 0
            least = 0.0
            if following is not None:
                after = following.count if level.last else left - count
                least = after * following.base_per_step + following.later_per_step
            if stepped + least <= per_step_limit_s:
                grown = (*picked, (level.klass, level.item.index, count)) if count else picked
                visit(
                    at + 1,
                    after,
                    time_s + count * level.item.time_s,
                    stepped,
                    room - count * level.item.cost,
                    grown,
                )
            return True

        if level.last:
            descend(left)
            return
        middle = level.relaxed_count(left, room)
        for count in range(middle, -1, -1):
            if not descend(count):
                break
        for count in range(middle + 1, left + 1):
            if not descend(count):
                break

    relaxed = levels[0].bound(first_count, budget)
    if relaxed is not None and relaxed * (1 + _RELATIVE) < best.time_s:
        visit(0, first_count, 0.0, 0.0, budget, ())

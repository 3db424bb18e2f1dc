"""A multiple-choice knapsack with counts: the core of the mixes inside a stage, solved exactly.

Over counts x_ck >= 0 of the items k of classes c, with sum_k x_ck = n_c:

    minimise   T = sum x_ck * time_ck
    subject to B = sum x_ck * cost_ck <= budget
               R = sum x_ck * per_step_ck <= per_step limit
               T + rate * R <= value limit, for each of some rates

by branch and bound. Each relaxation is a greedy walk along the classes' convex hulls over the
bytes: of T; of T + rate * R; and of T + mu * R, the Lagrangian relaxation of the limit on R, since
T >= (T + mu * R) - mu * limit. Where bytes do not bind, the best mu is the slope of some class's
hull over R, so those are tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

RELATIVE = 1e-12  # rounding allowance of sums, far below the 1e-6 that optima are compared at
INFINITY = float("inf")
_DIVE = 200  # visits of the first dive; any number is exact


@dataclass(frozen=True)
class Item:
    """A choice inside one stage: `index` into the class, `cost` its bytes there."""

    index: int
    time_s: float
    cost: float
    per_step_s: float
    workspace: float


Groups = list[tuple[int, int, list[Item]]]  # (class, count, items)
Picked = tuple[tuple[int, int, int], ...]  # (class, index, count)


@dataclass(frozen=True)
class Limits:
    """What a solution must keep to; `values` are pairs (rate, limit on T + rate * R)."""

    budget: float
    per_step_s: float = INFINITY
    values: tuple[tuple[float, float], ...] = ()

    @property
    def slack(self) -> float:
        """Bytes by which rounding may overrun the budget."""
        return RELATIVE * abs(self.budget)


@dataclass
class Best:
    """The incumbent; `time_s` is a limit before there is one."""

    time_s: float
    per_step_s: float = 0.0
    picked: Picked | None = None


def reduce(items: list[Item], bytes_count: bool, per_step_counts: bool) -> list[Item]:
    """Items that no other dominates in time and, where they count, bytes and per-step time."""
    kept: list[Item] = []
    for item in sorted(items, key=lambda i: (i.time_s, i.cost, i.per_step_s, i.index)):
        if not any(
            (not bytes_count or other.cost <= item.cost)
            and (not per_step_counts or other.per_step_s <= item.per_step_s)
            for other in kept
        ):
            kept.append(item)
    return kept


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Lower convex hull of (bytes, seconds), fewest bytes first."""
    hull: list[tuple[float, float]] = []
    for point in sorted(points):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) >= 2:
            a, b = hull[-2], hull[-1]
            if (b[1] - a[1]) * (point[0] - a[0]) >= (point[1] - a[1]) * (b[0] - a[0]):
                hull.pop()
            else:
                break
        hull.append(point)
    return hull


@dataclass(frozen=True)
class Relaxation:
    """Seconds against bytes of one level and all after it, fractions allowed.

    `base_*` are per layer of the level's class (all at their cheapest), `later_*` sums over the
    classes after it. `segments` are the hull edges of both, most seconds saved per byte first:
    (rate, seconds saved, bytes, whether per layer left); `edges` of them are the level's own.
    """

    base_cost: float
    base_s: float
    later_cost: float
    later_s: float
    segments: tuple[tuple[float, float, float, bool], ...]
    edges: int

    def bound(self, left: int, budget: float, slack: float) -> float | None:
        """The least seconds with `left` layers of the level's class; None if nothing fits.

        `slack` is the bytes by which rounding may overrun the budget.
        """
        room = budget - left * self.base_cost - self.later_cost
        if room < -slack:
            return None
        seconds = left * self.base_s + self.later_s
        for rate, gain, price, scaled in self.segments:
            if scaled:
                gain, price = gain * left, price * left
            if price <= room:
                seconds -= gain
                room -= price
            else:
                return seconds - rate * max(room, 0.0)
        return seconds

    def count(self, left: int, budget: float) -> int:
        """How many of `left` take the class's fastest item here, rounded down.

        That item is reached by the last hull edge of its class.
        """
        room = budget - left * self.base_cost - self.later_cost
        if room <= 0 or left == 0:
            return 0 if self.edges else left
        edges = self.edges
        for _, _, price, scaled in self.segments:
            if scaled:
                edges -= 1
                price *= left
            if price > room:
                share = room / price if scaled and edges == 0 else 0.0
                return int(left * share)
            room -= price
            if scaled and edges == 0:
                return left
        return left


def _relaxed(points: list[tuple[float, float]], later: _Tail) -> Relaxation:
    hull = _hull(points)
    own = [
        ((a[1] - b[1]) / (b[0] - a[0]), a[1] - b[1], b[0] - a[0], True)
        for a, b in zip(hull, hull[1:], strict=False)
    ]
    segments = tuple(sorted([*own, *later.segments], key=lambda segment: -segment[0]))
    return Relaxation(*hull[0], later.cost, later.seconds, segments, len(own))


@dataclass(frozen=True)
class _Tail:
    """What a relaxation knows of the classes after its own."""

    cost: float = 0.0
    seconds: float = 0.0
    segments: tuple[tuple[float, float, float, bool], ...] = ()

    def with_class(self, first: Relaxation, count: int) -> _Tail:
        """This and a class more, whose whole count is known here."""
        segments = tuple(
            (rate, gain * count, price * count, False) if scaled else (rate, gain, price, False)
            for rate, gain, price, scaled in first.segments
        )
        cost = self.cost + count * first.base_cost
        return _Tail(cost, self.seconds + count * first.base_s, segments)


@dataclass(frozen=True)
class _Range:
    """Least R and most bytes that some layers may take."""

    least_per_step_s: float = 0.0
    most_cost: float = 0.0

    @classmethod
    def of(cls, items: list[Item]) -> _Range:
        """One layer that takes any of these."""
        return cls(min(item.per_step_s for item in items), max(item.cost for item in items))

    def plus(self, other: _Range, count: int) -> _Range:
        """This and `count` times another."""
        return _Range(
            self.least_per_step_s + count * other.least_per_step_s,
            self.most_cost + count * other.most_cost,
        )


@dataclass(frozen=True)
class Level:
    """One decision: how many of what is left of a class take `item`.

    `relaxed` holds a relaxation of T + rate * R for each rate of the search, of T first; `own` is
    per layer of the class, from `item` on, and `later` of all classes after it.
    """

    klass: int
    item: Item
    last: bool
    count: int
    relaxed: tuple[Relaxation, ...]
    own: _Range
    later: _Range


def levels(groups: Groups, rates: tuple[float, ...] = (0.0,)) -> list[Level]:
    """The decisions of a search, class after class, each class's fastest item first."""
    found: list[Level] = []
    tails = [_Tail()] * len(rates)
    later = _Range()
    for klass, count, items in reversed(groups):
        for start in range(len(items) - 1, -1, -1):
            rest = items[start:]
            relaxed = tuple(
                _relaxed([(i.cost, i.time_s + rate * i.per_step_s) for i in rest], tail)
                for rate, tail in zip(rates, tails, strict=True)
            )
            own, last = _Range.of(rest), len(rest) == 1
            found.append(Level(klass, items[start], last, count, relaxed, own, later))
        first = found[-1]
        tails = [tail.with_class(r, count) for tail, r in zip(tails, first.relaxed, strict=True)]
        later = later.plus(first.own, count)
    found.reverse()
    return found


def root(groups: Groups, rate: float) -> Relaxation:
    """The relaxation of T + rate * R over all classes."""
    tail = _Tail()
    found = None
    for _, count, items in reversed(groups):
        found = _relaxed([(i.cost, i.time_s + rate * i.per_step_s) for i in items], tail)
        tail = tail.with_class(found, count)
    if found is None:
        raise AssertionError("a stage without layers")
    return found


def slopes(groups: Groups) -> tuple[float, ...]:
    """Seconds of T that a second of R costs along the hulls of the classes, least first."""
    found: set[float] = set()
    for _, _, items in groups:
        hull = _hull([(item.per_step_s, item.time_s) for item in items])
        for a, b in zip(hull, hull[1:], strict=False):
            found.add(float(f"{(a[1] - b[1]) / (b[0] - a[0]):.9g}"))
    return tuple(sorted(found))


def branch(
    levels: list[Level], rates: tuple[float, ...], first_count: int, limits: Limits, best: Best
) -> None:
    """Improve `best` to the optimum: a depth-first dive for an incumbent, then a level-wise sweep.

    The sweep keeps, at each level and for each number of layers left, the states that no other one
    equals or beats in T, R and bytes, and whose relaxations do not rule them out. The relaxations
    are convex in a level's count, so the counts that can win are an interval, looked for outward
    from the count that relaxes T.
    """
    search = _Search(levels, rates, limits, best)
    if search.open(levels[0], first_count, _State(0.0, 0.0, limits.budget)):
        search.dive(0, first_count, _State(0.0, 0.0, limits.budget))
        if search.visits > _DIVE:
            search.sweep(first_count)


class _State(NamedTuple):
    """T and R spent, bytes still free, and what was picked."""

    time_s: float
    per_step_s: float
    room: float
    picked: Picked = ()


class _Search:
    """One branch and bound."""

    def __init__(
        self, levels: list[Level], rates: tuple[float, ...], limits: Limits, best: Best
    ) -> None:
        self.levels, self.limits, self.best = levels, limits, best
        self.visits = 0
        self.slack = limits.slack
        # T alone counts: what relaxes it is among the counts that can win, if any is
        self.plain = len(rates) == 1 and limits.per_step_s == INFINITY
        most = {rate: limit * (1 + RELATIVE) for rate, limit in limits.values}
        # (rate, what a bound on T + rate * R may exceed the incumbent's time by, a limit on it)
        self.rules = [
            (rate, rate * limits.per_step_s if rate else 0.0, most.get(rate, INFINITY))
            for rate in rates
        ]

    def open(self, level: Level, left: int, state: _State) -> bool:
        """Whether something better may lie below `level` with `left` layers of its class."""
        for (rate, spare, most), relaxed in zip(self.rules, level.relaxed, strict=True):
            more = relaxed.bound(left, state.room, self.slack)
            if more is None:
                return False
            value = state.time_s + rate * state.per_step_s + more
            if value > most or (value - spare) * (1 + RELATIVE) >= self.best.time_s:
                return False
        if self.limits.per_step_s == INFINITY:
            return True
        least = left * level.own.least_per_step_s + level.later.least_per_step_s
        return state.per_step_s + least <= self.limits.per_step_s

    def dive(self, at: int, left: int, state: _State) -> None:
        """Depth first from level `at` with `left` layers of its class, for so many visits."""
        self.visits += 1
        if at == len(self.levels):
            self.finish(state)
            return
        for after, following in self.children(at, left, state):
            if self.visits > _DIVE:
                return
            self.dive(at + 1, after, following)

    def sweep(self, first_count: int) -> None:
        """Level by level from the root, equal and worse states dropped."""
        states = {first_count: [_State(0.0, 0.0, self.limits.budget)]}
        for at, level in enumerate(self.levels):
            reached: dict[int, list[_State]] = {}
            for left, some in states.items():
                for state in some:
                    # the incumbent may have improved since
                    if self.open(level, left, state):
                        for after, following in self.children(at, left, state):
                            reached.setdefault(after, []).append(following)
            states = {left: _undominated(some) for left, some in reached.items()}
        for some in states.values():
            for state in some:
                self.finish(state)

    def children(self, at: int, left: int, state: _State) -> Iterator[tuple[int, _State]]:
        """(layers left of the next level's class, state) for the counts that may win."""
        level = self.levels[at]
        following = self.levels[at + 1] if at + 1 < len(self.levels) else None
        middle = left if level.last else level.relaxed[0].count(left, state.room)
        down = range(left, left - 1, -1) if level.last else range(middle, -1, -1)
        for side in (down, range(middle + 1, left + 1)):
            entered = self.plain
            for count in side:
                spent = self.spend(level, count, state)
                after = 0
                if following is not None:
                    after = following.count if level.last else left - count
                    possible = self.open(following, after, spent)
                    # room that even the biggest choices leave over is worth nothing
                    most = after * following.own.most_cost + following.later.most_cost
                    spent = spent._replace(room=min(spent.room, most))
                else:
                    possible = spent.room >= -self.slack
                if possible:
                    entered = True
                    yield after, spent
                elif entered:
                    break

    def spend(self, level: Level, count: int, state: _State) -> _State:
        """`state` after `count` layers took the level's item."""
        item = level.item
        return _State(
            state.time_s + count * item.time_s,
            state.per_step_s + count * item.per_step_s,
            state.room - count * item.cost,
            (*state.picked, (level.klass, item.index, count)) if count else state.picked,
        )

    def finish(self, state: _State) -> None:
        """Keep a state without open decisions if it beats the incumbent."""
        best = self.best
        if state.room < -self.slack or state.time_s * (1 + RELATIVE) >= best.time_s:
            return
        if state.per_step_s > self.limits.per_step_s:
            return
        if any(state.time_s + rate * state.per_step_s > most for rate, _, most in self.rules):
            return
        best.time_s, best.per_step_s, best.picked = state.time_s, state.per_step_s, state.picked


def _undominated(states: list[_State]) -> list[_State]:
    """The states that no other one equals or beats in T, R and bytes."""
    kept: list[_State] = []
    # of the states kept, those least in R for their room: room falls and R falls
    rooms: list[float] = []
    steps: list[float] = []
    for state in sorted(states, key=lambda s: (s.time_s, -s.room, s.per_step_s)):
        at = bisect_left(rooms, -state.room)
        more = at < len(rooms) and rooms[at] == -state.room
        if (at and steps[at - 1] <= state.per_step_s) or (more and steps[at] <= state.per_step_s):
            continue
        kept.append(state)
        end = at
        while end < len(rooms) and steps[end] >= state.per_step_s:
            end += 1
        rooms[at:end] = [-state.room]
        steps[at:end] = [state.per_step_s]
    return kept

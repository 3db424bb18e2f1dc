"""The fastest mix of choices for one stage: how many of its layers of each class take which choice.

For a stage with n_c layers of class c, over counts x_ck >= 0 with sum_k x_ck = n_c:

    minimise   T = sum x_ck * time_ck
    subject to sum x_ck * (state_ck + in_flight * activation_ck) + max workspace <= budget
               sum x_ck * per_step_ck <= per_step limit

Identical layers are interchangeable, so counts say everything. The workspace maximum is linearised
by trying workspace values as the cap, those near each other together. Each case is a knapsack with
counts, solved exactly (:mod:`ds_autoplan.search.knapsack`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ds_autoplan.search.knapsack import (
    INFINITY,
    RELATIVE,
    Best,
    Groups,
    Item,
    Level,
    Limits,
    Relaxation,
    branch,
    levels,
    reduce,
    root,
    slopes,
)
from ds_autoplan.search.problem import Choice, Problem

_NEAR = 3e-3  # of the budget: workspace caps that are searched together first
_TIGHTENINGS = 20  # rounds at most, each of which must tighten by
_TIGHTER = 1e-3


@dataclass(frozen=True)
class Mix:
    """Counts per class and choice (indices into the class's choices), with their totals."""

    time_s: float
    per_step_s: float
    counts: tuple[tuple[tuple[int, int], ...], ...]

    def value_s(self, rate: float) -> float:
        """Its time with a second of per-step time worth `rate` seconds."""
        return self.time_s + rate * self.per_step_s


@dataclass(frozen=True)
class Room:
    """What one stage offers its layers: `budget` bytes for them and the workspace."""

    in_flight: float
    budget: float
    workspace_floor: float

    @property
    def slack(self) -> float:
        """Bytes by which rounding may overrun the budget."""
        return RELATIVE * abs(self.budget)


def room_of(problem: Problem, stage: int, carried: float) -> Room:
    """What `stage` offers its layers where the cut before it carries that many bytes."""
    own = problem.stages[stage]
    kept = own.activation_bytes + carried
    budget = own.capacity_bytes - own.state_bytes - own.in_flight * kept
    return Room(own.in_flight, budget, own.workspace_bytes)


@dataclass(frozen=True)
class Wanted:
    """Which mixes of a stage can belong to a plan that beats the incumbent.

    Those with time_s <= `time_limit_s` and time_s + rate * per_step_s <= limit for each of the
    pairs `values`. What `per_step_s` is below `per_step_floor_s` gains nothing, because the slowest
    stage counts. Where `only_value` holds, the first value is all that counts (a single stage).
    With `rates` only the mixes that are best at these rates are looked for.
    """

    time_limit_s: float
    per_step_floor_s: float
    values: tuple[tuple[float, float], ...]
    only_value: bool = False
    rates: tuple[float, ...] = ()


class _Allowed:
    """The items that a workspace cap leaves, and what is worked out from them once."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.slopes = slopes(groups)
        self._roots: dict[float, Relaxation] = {}
        self._levels: dict[tuple[float, ...], list[Level]] = {}

    def root(self, rate: float) -> Relaxation:
        """The relaxation of time_s + rate * per_step_s."""
        if rate not in self._roots:
            self._roots[rate] = root(self.groups, rate)
        return self._roots[rate]

    def levels(self, rates: tuple[float, ...]) -> list[Level]:
        """The decisions, relaxed for these rates."""
        if rates not in self._levels:
            self._levels[rates] = levels(self.groups, rates)
        return self._levels[rates]

    def searched(self, first_count: int, limits: Limits) -> tuple[Limits, tuple[float, ...]]:
        """The limits, each tightened by the others, and the rates whose relaxations prune.

        These are no rate, the values', and the one that bounds T best under the limit on R. That
        bound and a limit on T + rate * R limit R again, and so on.
        """
        if limits.per_step_s == INFINITY and not limits.values:
            return limits, (0.0,)
        best = 0.0
        for _ in range(_TIGHTENINGS):

            def bound(rate: float, limits: Limits = limits) -> float:
                relaxed = self.root(rate).bound(first_count, limits.budget, limits.slack)
                spare = rate * limits.per_step_s if rate else 0.0
                return INFINITY if relaxed is None else relaxed - spare

            best = max((0.0, *self.slopes), key=bound)
            least = bound(best)
            allowed = [(most - least) / rate * (1 + RELATIVE) for rate, most in limits.values]
            per_step_s = max(min(allowed, default=INFINITY), 0.0)
            if per_step_s > limits.per_step_s * (1 - _TIGHTER):
                break
            limits = replace(limits, per_step_s=per_step_s)
        rates = (0.0, *(rate for rate, _ in limits.values), best)
        return limits, tuple(dict.fromkeys(rates))


@dataclass(frozen=True)
class _UnderCap:
    """The items with at most `cap` bytes of workspace.

    `first_cost` is the most bytes of a layer of the first class, `later_cost` of all other layers.
    """

    cap: float
    groups: Groups
    first_cost: float
    later_cost: float
    _kept: dict[tuple[bool, bool], _Allowed] = field(default_factory=dict)

    def allowed(self, bytes_count: bool = True, per_step_counts: bool = False) -> _Allowed:
        """The items that matter where bytes may bind and where per-step times count."""
        kind = (bytes_count, per_step_counts)
        if kind not in self._kept:
            groups = [(k, n, reduce(items, *kind)) for k, n, items in self.groups]
            self._kept[kind] = _Allowed(groups)
        return self._kept[kind]


def _under_caps(groups: Groups, caps: list[float]) -> Iterator[_UnderCap]:
    for cap in caps:
        under = [(k, n, [i for i in items if i.workspace <= cap]) for k, n, items in groups]
        if all(items for _, _, items in under):
            most = [max(item.cost for item in items) for _, _, items in under]
            later = sum(n * cost for (_, n, _), cost in zip(under[1:], most[1:], strict=True))
            yield _UnderCap(cap, under, most[0], later)


@dataclass
class _Job:
    """One search for the fastest mix over all workspace caps; `best` is its incumbent."""

    caps: list[_UnderCap]
    room: Room
    first_count: int
    per_step_limit_s: float
    values: tuple[tuple[float, float], ...]
    best: Best

    def runs(self, low: int) -> list[tuple[int, int]]:
        """(first, last) of the runs of caps that are near each other, the least bound first."""
        found: list[tuple[int, int]] = []
        while low < len(self.caps):
            near = self.caps[low].cap + _NEAR * self.room.budget
            high = low
            while high + 1 < len(self.caps) and self.caps[high + 1].cap <= near:
                high += 1
            found.append((low, high))
            low = high + 1
        return sorted(found, key=self._bound) if len(found) > 1 else found

    def _bound(self, run: tuple[int, int]) -> float:
        low, high = run
        room = self.room
        relaxed = self.caps[high].allowed().root(0.0)
        bound = relaxed.bound(self.first_count, room.budget - self.caps[low].cap, room.slack)
        return INFINITY if bound is None else bound

    def improve(self, low: int, high: int, bytes_count: bool = True) -> None:
        """Improve `best` to the optimum under the caps `low` to `high`.

        With the biggest cap's choices and the smallest cap's bytes one search bounds all of them,
        and is exact if what it finds fits. Else the caps are halved.
        """
        limited = self.per_step_limit_s < INFINITY or bool(self.values)
        allowed = self.caps[high].allowed(bytes_count, limited)
        limits = Limits(self.room.budget - self.caps[low].cap, self.per_step_limit_s, self.values)
        limits, rates = allowed.searched(self.first_count, limits)
        found = Best(self.best.time_s)
        branch(allowed.levels(rates), rates, self.first_count, limits, found)
        if found.picked is None:
            return
        if low == high or self._fits(found, high):
            self.best = found
            return
        middle = (low + high) // 2
        self.improve(low, middle)
        self.improve(middle + 1, high)

    def _fits(self, found: Best, high: int) -> bool:
        items = {
            (klass, item.index): item for klass, _, some in self.caps[high].groups for item in some
        }
        picked = [(items[klass, index], count) for klass, index, count in found.picked or ()]
        need = max(self.room.workspace_floor, *(item.workspace for item, _ in picked))
        need += sum(count * item.cost for item, count in picked)
        return need <= self.room.budget + self.room.slack


class Mixer:
    """Fastest mixes of one problem's choices; what does not depend on the counts is kept."""

    def __init__(self, choices: tuple[tuple[Choice, ...], ...]) -> None:
        """Keep the choices of every class."""
        self.choices = choices
        self._of_class: dict[tuple[int, float], list[Item]] = {}
        self._caps: dict[object, list[_UnderCap]] = {}
        self._valued: dict[float, Mixer] = {}

    def fastest(
        self,
        counts: tuple[int, ...],
        room: Room,
        time_limit_s: float = INFINITY,
        per_step_limit_s: float = INFINITY,
        values: tuple[tuple[float, float], ...] = (),
    ) -> Mix | None:
        """The fastest feasible mix, or None if nothing fits (or nothing is faster than the limit).

        Args:
            counts: layers of each class in the stage.
            room: what the stage offers.
            time_limit_s: only mixes at most this slow are of interest.
            per_step_limit_s: limit on the layers' summed `per_step_s`.
            values: pairs (rate, limit on time_s + rate * per_step_s).
        """
        groups = self._groups(counts, room)
        limited = per_step_limit_s < INFINITY or bool(values)
        if not limited:
            fast = _uniform(groups, room)
            if fast is not None:
                return fast if fast.time_s <= time_limit_s * (1 + RELATIVE) else None
        caps, free = self._caps_of(groups, room)
        job = _Job(caps, room, groups[0][1], per_step_limit_s, values, Best(time_limit_s))
        job.best.time_s *= 1 + RELATIVE
        if free >= 0:
            job.improve(free, free, bytes_count=False)
        for low, high in job.runs(free + 1):
            job.improve(low, high)
        return _mix(job.best, len(counts))

    def least_value(self, counts: tuple[int, ...], room: Room, rate: float) -> Mix | None:
        """The feasible mix with the least time_s + rate * per_step_s, or None if nothing fits."""
        by_value = self._by_value(rate).fastest(counts, room)
        if by_value is None:
            return None
        time_s = per_step_s = 0.0
        for choices, picked in zip(self.choices, by_value.counts, strict=False):
            for index, count in picked:
                time_s += count * choices[index].time_s
                per_step_s += count * choices[index].per_step_s
        return Mix(time_s, per_step_s, by_value.counts)

    def _by_value(self, rate: float) -> Mixer:
        """The mixer of the same choices with time_s + rate * per_step_s as their time."""
        if rate not in self._valued:
            self._valued[rate] = Mixer(
                tuple(
                    tuple(
                        replace(c, time_s=c.time_s + rate * c.per_step_s, per_step_s=0.0)
                        for c in choices
                    )
                    for choices in self.choices
                )
            )
        return self._valued[rate]

    def frontier(
        self, counts: tuple[int, ...], room: Room, wanted: Wanted
    ) -> tuple[list[Mix], bool]:
        """The wanted part of the Pareto frontier (time, per-step time), fastest first.

        And whether it is whole: where `wanted.rates` are given, only the fastest mix and those of
        the least time_s + rate * per_step_s at these rates are looked for.
        """
        least = sum(
            count * min(choice.per_step_s for choice in self.choices[klass])
            for klass, count in enumerate(counts)
            if count
        )
        enough = max(least, wanted.per_step_floor_s) * (1 + RELATIVE)
        mix = self.fastest(counts, room, wanted.time_limit_s)
        if mix is None or mix.per_step_s <= enough:
            return [mix] if mix is not None else [], True
        if wanted.rates:
            some = [mix, *(self.least_value(counts, room, rate) for rate in wanted.rates)]
            found = list({m for m in some if m is not None})
            return sorted(found, key=lambda m: (m.time_s, m.per_step_s)), False
        values = tuple((rate, limit) for rate, limit in wanted.values if limit < INFINITY)
        for rate, limit in wanted.values:
            cheapest = self.least_value(counts, room, rate)
            if cheapest is None or cheapest.value_s(rate) > limit * (1 + RELATIVE):
                return [], True
            if wanted.only_value:
                return [cheapest], True
        found = []
        while mix is not None:
            if all(mix.value_s(rate) <= limit * (1 + RELATIVE) for rate, limit in values):
                found.append(mix)
            if mix.per_step_s <= enough:
                break
            limit = mix.per_step_s * (1 - 1e-9)
            mix = self.fastest(counts, room, wanted.time_limit_s, limit, values)
        return found, True

    def relaxed_s(self, counts: tuple[int, ...], room: Room) -> float:
        """A lower bound on :meth:`fastest`'s time, fractions allowed; infinite: nothing fits."""
        groups = self._groups(counts, room)
        least = INFINITY
        for under in self._caps_of(groups, room)[0]:
            bound = (
                under.allowed().root(0.0).bound(groups[0][1], room.budget - under.cap, room.slack)
            )
            if bound is not None:
                least = min(least, bound)
        return least

    def fits(self, counts: tuple[int, ...], room: Room) -> bool:
        """Whether any mix fits."""
        groups = self._groups(counts, room)
        for under in self._caps_of(groups, room)[0]:
            first = under.allowed().root(0.0)
            need = groups[0][1] * first.base_cost + first.later_cost
            if need <= room.budget - under.cap + room.slack:
                return True
        return False

    def _groups(self, counts: tuple[int, ...], room: Room) -> Groups:
        return [
            (klass, count, self._items(klass, room.in_flight))
            for klass, count in enumerate(counts)
            if count
        ]

    def _caps_of(self, groups: Groups, room: Room) -> tuple[list[_UnderCap], int]:
        """Every workspace cap under which all classes have a choice, the smallest first.

        And the last of those under which the biggest choices fit, too, or -1.
        """
        # the first class's count is the search's own argument, so one class needs one entry only
        contents = tuple((klass, count if at else 0) for at, (klass, count, _) in enumerate(groups))
        key = (contents, room.workspace_floor, room.in_flight)
        if key not in self._caps:
            workspaces = {max(room.workspace_floor, i.workspace) for g in groups for i in g[2]}
            self._caps[key] = list(_under_caps(groups, sorted(workspaces)))
        caps = self._caps[key]
        free = -1
        for at, under in enumerate(caps):
            if groups[0][1] * under.first_cost + under.later_cost <= room.budget - under.cap:
                free = at
        return caps, free

    def _items(self, klass: int, in_flight: float) -> list[Item]:
        key = (klass, in_flight)
        if key not in self._of_class:
            self._of_class[key] = [
                Item(
                    index,
                    choice.time_s,
                    choice.state_bytes + in_flight * choice.activation_bytes,
                    choice.per_step_s,
                    choice.workspace_bytes,
                )
                for index, choice in enumerate(self.choices[klass])
            ]
        return self._of_class[key]


def _mix(best: Best, classes: int) -> Mix | None:
    if best.picked is None:
        return None
    per_class: list[list[tuple[int, int]]] = [[] for _ in range(classes)]
    for klass, index, count in best.picked:
        per_class[klass].append((index, count))
    return Mix(best.time_s, best.per_step_s, tuple(tuple(sorted(p)) for p in per_class))


def _uniform(groups: Groups, room: Room) -> Mix | None:
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
    if cost + workspace > room.budget * (1 + RELATIVE):
        return None
    return Mix(time_s, per_step, tuple(counts))

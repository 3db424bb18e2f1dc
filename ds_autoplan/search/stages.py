"""Stage options for the path over cuts, each distinct content solved once, with bounds on the rest.

Besides a stage's Pareto mixes this answers, for every position where a stage may start, the least
summed time and the least slowest time of all stages from there on, each exact by itself (a backward
pass over positions). Together they bound any continuation of a partial path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ds_autoplan.search.knapsack import INFINITY, RELATIVE
from ds_autoplan.search.mix import Mix, Mixer, Wanted, room_of
from ds_autoplan.search.problem import Problem, fastest_times, prefix_counts


class Stages:
    """One problem's stages under an incumbent.

    `least_s` is what all stages take together at the least; `longest_s` the slowest stage that can
    still beat the incumbent;
    `rest_sum_s[stage][position]` and `rest_longest_s[stage][position]` bound the stages from
    `stage` on.
    """

    def __init__(
        self,
        problem: Problem,
        incumbent_s: float,
        bounds: tuple[int, ...] | None = None,
        values: dict[object, float] | None = None,
    ) -> None:
        """Bound every stage's time by the incumbent, then bound the rests.

        Where `bounds` are given, that cut is the only one.

        Without `values` only few mixes of each frontier are worked out, for a first incumbent;
        `whole` says whether they happen to be all. `values` is what :meth:`value_limits` of such
        stages found.
        """
        self.values, self.whole = values, True
        self.problem = problem
        self.incumbent_s = incumbent_s
        self.counts = prefix_counts(problem)
        self.mixer = Mixer(problem.choices)
        self._mixes: dict[object, list[Mix]] = {}
        self._least_bytes: dict[tuple[int, float], float] = {}
        fastest = fastest_times(problem)
        self.prefix_s = [0.0]
        for layer in problem.layers:
            self.prefix_s.append(self.prefix_s[-1] + fastest[layer])
        cuts = problem.cut_time_s[1:]
        last = len(problem.stages) - 1
        self.least_cut_s = min(cuts) if cuts and last > 0 else 0.0
        per_step = [min(c.per_step_s for c in choices) for choices in problem.choices]
        total = sum(per_step[layer] for layer in problem.layers)
        total += sum(stage.per_step_s for stage in problem.stages)
        self.per_step_floor_s = total / (last + 1)
        self.rest_sum_s: list[dict[int, float]] = []
        self.rest_longest_s: list[dict[int, float]] = []
        # a second of R in seconds of T, where the slowest stage is no slower than the mean
        self._rate = 1 / (problem.sum_weight * (last + 1) + problem.max_weight)
        self.least_s = self.prefix_s[-1] + last * self.least_cut_s
        self.least_s += sum(stage.time_s for stage in problem.stages)
        self.longest_s = self._longest(self.least_s)
        self.windows = [(at, at) for at in bounds] if bounds else self._windows()
        if self.windows is not None:
            self._bound_rests(self.windows)
            if 0 in self.rest_sum_s[0]:
                self.longest_s = min(self.longest_s, self._longest(self.rest_sum_s[0][0]))

    @property
    def bound_s(self) -> float:
        """A lower bound on every solution that beats the incumbent; infinite if there is none."""
        if self.windows is None or 0 not in self.rest_sum_s[0]:
            return INFINITY
        return self.bound(self.rest_sum_s[0][0], self.rest_longest_s[0][0], 0.0)

    def bound(self, total_s: float, longest_s: float, per_step_s: float) -> float:
        """The objective of given totals."""
        return (
            self.problem.sum_weight * total_s
            + self.problem.max_weight * longest_s
            + max(per_step_s, self.per_step_floor_s)
            + self.problem.constant_s
        )

    def _longest(self, total_s: float) -> float:
        """The slowest stage that beats the incumbent where all stages together take `total_s`."""
        spare = self.incumbent_s - self.bound(total_s, 0.0, 0.0)
        if self.problem.max_weight > 0:
            return spare / self.problem.max_weight * (1 + RELATIVE)
        return (total_s + spare / self.problem.sum_weight) * (1 + RELATIVE)

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
                least += (after - before) * self._least(klass, own.in_flight)
        return least > budget * (1 + RELATIVE)

    def _least(self, klass: int, in_flight: float) -> float:
        key = (klass, in_flight)
        if key not in self._least_bytes:
            self._least_bytes[key] = min(
                choice.state_bytes + in_flight * choice.activation_bytes
                for choice in self.problem.choices[klass]
            )
        return self._least_bytes[key]

    def options(self, stage: int, first: int, end: int) -> list[Mix]:
        """The Pareto mixes of layers first..end-1 on `stage`, fastest first.

        Mixes that cannot beat the first incumbent may be missing; ask :attr:`longest_s` of each.
        """
        counts = self._counts(first, end)
        carried = self.problem.carried(first)
        key = (stage, counts, carried)
        found = self._mixes.get(key)
        if found is None:
            if self.values is not None and self.values.get(key, -1.0) < 0:
                return []
            room = room_of(self.problem, stage, carried)
            wanted = self._wanted(stage, first, end)
            if self.values is not None:
                value = (self._rate, self.values[key])
                wanted = replace(wanted, values=(*wanted.values, value))
            found, whole = self.mixer.frontier(counts, room, wanted)
            self.whole = self.whole and whole
            self._mixes[key] = found
        return found

    def _wanted(self, stage: int, first: int, end: int) -> Wanted:
        """Which mixes of layers first..end-1 can still beat the incumbent.

        The plan takes at least what all other layers take at their fastest, and its slowest stage
        at least what this one takes.
        """
        problem, own = self.problem, self.problem.stages[stage]
        cut = self.least_cut_s if stage < len(problem.stages) - 1 else 0.0
        weight = problem.sum_weight + problem.max_weight
        others = self.least_s - (self.prefix_s[end] - self.prefix_s[first])
        spare = self.incumbent_s - problem.constant_s - problem.sum_weight * others
        spare -= problem.max_weight * (own.time_s + cut) + own.per_step_s
        alone = len(problem.stages) == 1
        return Wanted(
            self.longest_s - own.time_s - cut,
            self.per_step_floor_s - own.per_step_s,
            ((1 / weight, spare / weight),),
            only_value=alone,
            rates=() if alone or self.values is not None else (1 / weight, self._rate),
        )

    def value_limits(self, incumbent_s: float) -> dict[object, float]:
        """For each content of a stage the most T + rate * R of its layers that can still win.

        The slowest stage takes at least the mean of all, so the objective is at least

            sum over stages of (sum_weight + max_weight / P) * T_s + R_s / P, + constant

        of which every stage's least is known, and so is the least of the stages before and after.
        """
        count, layers = len(self.problem.stages), len(self.problem.layers)
        windows = self.windows or []
        before: list[dict[int, float]] = [{0: 0.0}, *({} for _ in range(count))]
        steps: list[tuple[int, int, int, object, float]] = []
        for stage in range(count):
            for first, spent in before[stage].items():
                for end in range(max(first + 1, windows[stage + 1][0]), windows[stage + 1][1] + 1):
                    if end not in self.rest_sum_s[stage + 1]:
                        continue
                    if self.hopeless(stage, first, end):
                        break
                    mixes = self.options(stage, first, end)
                    if mixes:
                        own = self.problem.stages[stage].per_step_s
                        fixed = self.fixed_s(stage, end) + self._rate * own
                        key = (stage, self._counts(first, end), self.problem.carried(first))
                        steps.append((stage, first, end, key, fixed))
                        value = spent + fixed + min(mix.value_s(self._rate) for mix in mixes)
                        best = before[stage + 1].get(end, INFINITY)
                        before[stage + 1][end] = min(best, value)
        after: list[dict[int, float]] = [*({} for _ in range(count)), {layers: 0.0}]
        limits: dict[object, float] = {}
        problem = self.problem
        weight = problem.sum_weight + problem.max_weight / count
        most = (incumbent_s - problem.constant_s) / weight
        for stage, first, end, content, fixed in reversed(steps):
            rest = after[stage + 1].get(end, INFINITY)
            least = min(mix.value_s(self._rate) for mix in self._mixes[content])
            after[stage][first] = min(after[stage].get(first, INFINITY), fixed + least + rest)
            limit = most - before[stage][first] - rest - fixed
            limits[content] = max(limits.get(content, -1.0), limit)
        return limits

    def _counts(self, first: int, end: int) -> tuple[int, ...]:
        """Layers of each class among first..end-1."""
        if len(self.problem.choices) == 1:
            return (end - first,)
        pairs = zip(self.counts[end], self.counts[first], strict=True)
        return tuple(after - before for after, before in pairs)

    def _windows(self) -> list[tuple[int, int]] | None:
        """For each stage the positions where it may start, from the limit on a stage's time."""
        count, layers = len(self.problem.stages), len(self.problem.layers)
        cuts = self.problem.cut_time_s[1:]
        alike = not any(self.problem.carried_bytes) and len(set(cuts)) <= 1

        def fits(stage: int, first: int, end: int) -> bool:
            own = self.problem.stages[stage]
            least = self.prefix_s[end] - self.prefix_s[first]
            if least + own.time_s > self.longest_s:
                return False
            if not alike:
                return True  # fewer layers may cost more: only what holds for both is used
            cut = self.least_cut_s if stage < count - 1 else 0.0
            mixed = self.mixer.relaxed_s(
                self._counts(first, end), room_of(self.problem, stage, 0.0)
            )
            return mixed + own.time_s + cut <= self.longest_s

        def longer(stage: int, first: int, taken: int) -> bool:
            return fits(stage, first, first + taken)

        def earlier(stage: int, end: int, taken: int) -> bool:
            return fits(stage, end - taken, end)

        high = [0]
        for stage in range(count):
            first = high[stage]
            most = layers - (count - 1 - stage) - first
            taken = _most(partial(longer, stage, first), most, _last_gap(high))
            high.append(first + taken)  # 0: a layer for later stages, so this one ends before it
        if high[count] < layers:
            return None
        low = [layers]
        for stage in range(count - 1, 0, -1):
            end = low[-1]
            taken = _most(partial(earlier, stage, end), end - stage, _last_gap(low))
            low.append(end - taken)
        low.append(0)
        return list(zip(reversed(low), high, strict=True))

    def _bound_rests(self, windows: list[tuple[int, int]]) -> None:
        """Backward over stages: least sum and least maximum of the times from each start on."""
        count, layers = len(self.problem.stages), len(self.problem.layers)
        sums: list[dict[int, float]] = [{} for _ in range(count + 1)]
        longest: list[dict[int, float]] = [{} for _ in range(count + 1)]
        sums[count][layers] = longest[count][layers] = 0.0
        for stage in range(count - 1, -1, -1):
            (low, high), (next_low, next_high) = windows[stage], windows[stage + 1]
            for first in range(low, high + 1):
                best_sum = best_longest = INFINITY
                for end in range(max(first + 1, next_low), next_high + 1):
                    rest = sums[stage + 1].get(end)
                    if rest is None:
                        continue
                    if self.hopeless(stage, first, end):
                        break
                    mixes = self.options(stage, first, end)
                    if not mixes:
                        continue
                    time_s = self.fixed_s(stage, end) + mixes[0].time_s
                    if time_s <= self.longest_s:
                        best_sum = min(best_sum, time_s + rest)
                        slowest = max(time_s, longest[stage + 1][end])
                        best_longest = min(best_longest, slowest)
                if best_sum < INFINITY:
                    sums[stage][first] = best_sum
                    longest[stage][first] = best_longest
        self.rest_sum_s, self.rest_longest_s = sums, longest


def _most(holds: Callable[[int], bool], most: int, guess: int) -> int:
    """The largest n in 0..most with holds(1) .. holds(n), for a rule that holds up to some n.

    Doubling steps away from `guess`, then bisection between what holds and what does not.
    """
    good, bad = 0, most + 1
    at, step = min(max(guess, 1), most), 1
    while bad - good > 1:
        if holds(at):
            good = at
            at = min(good + step, bad - 1) if bad == most + 1 else (good + bad) // 2
        else:
            bad = at
            at = max(bad - step, good + 1) if good == 0 else (good + bad) // 2
        step *= 2
    return good


def _last_gap(bounds: list[int]) -> int:
    """How many layers the stage before took: the first guess for the next one."""
    return abs(bounds[-1] - bounds[-2]) if len(bounds) > 1 else 1

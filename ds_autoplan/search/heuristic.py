"""A constructive plan: good cuts, each stage at its fastest mix; the exact search starts there.

Three cuts are tried: even by time, even by layers, and the one whose slowest stage is fastest,
found by bisection (pack stages from the last one on, as many layers as fit in memory and time). The
best is improved by moving single cuts. Where none of them fits, every reachable start of every
stage is worked out, so that None means infeasible (but for problems that carry values over cuts,
where fewer layers may need more memory).
"""

from __future__ import annotations

from ds_autoplan.search.mix import Mix, Mixer, Room, room_of
from ds_autoplan.search.problem import (
    Choice,
    Problem,
    Solution,
    evaluate,
    fastest_times,
    lower_bound,
    prefix_counts,
)

_MOST = 1e30  # any stage that fits is faster


def construct(problem: Problem, bounds: tuple[int, ...] | None = None) -> Solution | None:
    """A feasible solution, or None where there is none (see above for the one exception).

    Where `bounds` are given, that cut is the only one.
    """
    if bounds is not None:
        return _Builder(problem).solution(bounds)
    fastest = fastest_times(problem)
    layer_s = [fastest[layer] for layer in problem.layers]
    build = _Builder(problem)
    starts = [_even_times(problem, layer_s), _even_layers(problem)]
    priced = [(value, bounds) for bounds in starts if (value := build.objective(bounds))]
    packed = _bottleneck(build)
    if packed is not None and (value := build.objective(packed)):
        priced.append((value, packed))
    if not priced:
        reached = _reachable(build)
        if reached is None or (value := build.objective(reached)) is None:
            return None
        priced.append((value, reached))
    return build.solution(_climb(build, *min(priced)))


class _Builder:
    """Solutions for given bounds, each stage content solved once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.counts = prefix_counts(problem)
        self.mixer = Mixer(problem.choices)
        self.memo: dict[tuple[int, tuple[int, ...], float], Mix | None] = {}

    def mix(self, stage: int, first: int, end: int) -> Mix | None:
        """The fastest mix of layers first..end-1 on `stage`."""
        counts, room, carried = self._content(stage, first, end)
        key = (stage, counts, carried)
        if key not in self.memo:
            self.memo[key] = self.mixer.fastest(counts, room)
        return self.memo[key]

    def fits(self, stage: int, first: int, end: int) -> bool:
        """Whether layers first..end-1 fit on `stage` under any mix."""
        counts, room, _ = self._content(stage, first, end)
        return self.mixer.fits(counts, room)

    def _content(self, stage: int, first: int, end: int) -> tuple[tuple[int, ...], Room, float]:
        """Layers by class, what the stage offers them, and the bytes that the cut carries."""
        pairs = zip(self.counts[end], self.counts[first], strict=True)
        counts = tuple(after - before for after, before in pairs)
        carried = self.problem.carried(first)
        return counts, room_of(self.problem, stage, carried), carried

    def time(self, stage: int, first: int, end: int) -> float:
        """T_s of layers first..end-1 on `stage` at their fastest; infinite where none fits."""
        mix = self.mix(stage, first, end)
        if mix is None:
            return float("inf")
        cut = self.problem.cut_time(end) if end < len(self.problem.layers) else 0.0
        return self.problem.stages[stage].time_s + cut + mix.time_s

    def objective(self, bounds: tuple[int, ...]) -> float | None:
        """The objective with these bounds and each stage at its fastest, if every stage fits."""
        problem = self.problem
        times, steps = [], []
        for stage, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            mix = self.mix(stage, first, end) if end > first else None
            if mix is None:
                return None
            own = problem.stages[stage]
            cut = problem.cut_time(end) if end < len(problem.layers) else 0.0
            times.append(own.time_s + cut + mix.time_s)
            steps.append(own.per_step_s + mix.per_step_s)
        total = problem.sum_weight * sum(times) + problem.max_weight * max(times)
        return total + max(steps) + problem.constant_s

    def solution(self, bounds: tuple[int, ...]) -> Solution | None:
        """The solution with these bounds and each stage at its fastest, if every stage fits."""
        if self.objective(bounds) is None:
            return None
        chosen: list[Choice] = []
        for stage, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            mix = self.mix(stage, first, end)
            if mix is None:
                return None
            chosen += spread(self.problem, first, end, mix)
        objective = evaluate(self.problem, bounds, tuple(chosen))
        if objective is None:
            return None
        bound = min(objective, lower_bound(self.problem))
        return Solution(objective, bounds, tuple(chosen), bound, "heuristic")


def spread(problem: Problem, first: int, end: int, mix: Mix) -> list[Choice]:
    """A mix as a choice for each layer: a class takes its choices in order, fastest first."""
    queues = [
        [problem.choices[klass][index] for index, number in picked for _ in range(number)]
        for klass, picked in enumerate(mix.counts)
    ]
    taken = [0] * len(queues)
    chosen = []
    for layer in problem.layers[first:end]:
        chosen.append(queues[layer][taken[layer]])
        taken[layer] += 1
    return chosen


def _climb(build: _Builder, objective: float, bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Move single cuts by one layer while that helps; each pass over the cuts, first gain taken."""
    improved = True
    while improved:
        improved = False
        for cut in range(1, len(bounds) - 1):
            for move in (-1, 1):
                moved = (*bounds[:cut], bounds[cut] + move, *bounds[cut + 1 :])
                value = build.objective(moved)
                if value is not None and value < objective * (1 - 1e-12):
                    objective, bounds, improved = value, moved, True
    return bounds


def _even_layers(problem: Problem) -> tuple[int, ...]:
    count, layers = len(problem.stages), len(problem.layers)
    return tuple(round(stage * layers / count) for stage in range(count + 1))


def _even_times(problem: Problem, layer_s: list[float]) -> tuple[int, ...]:
    """Cut where the running time passes each stage's even share."""
    count, layers = len(problem.stages), len(problem.layers)
    total = sum(layer_s) + sum(stage.time_s for stage in problem.stages)
    bounds, spent, position = [0], 0.0, 0
    for stage in range(count - 1):
        share = total * (stage + 1) / count
        spent += problem.stages[stage].time_s
        first = position
        while position < layers - (count - 1 - stage):
            after = spent + layer_s[position]
            if position > first and after - share > share - spent:
                break
            spent, position = after, position + 1
        bounds.append(position)
    return (*bounds, layers)


def _packed(build: _Builder, longest_s: float) -> tuple[int, ...] | None:
    """From the last stage on, as many layers as fit and run within `longest_s`."""
    count, layers = len(build.problem.stages), len(build.problem.layers)
    bounds = [layers]
    for stage in range(count - 1, -1, -1):
        end = bounds[-1]
        low, high = stage, end  # the first layer lies in low..high-1; high stands for "none fits"
        while low < high:
            middle = (low + high) // 2
            if build.time(stage, middle, end) <= min(longest_s, _MOST):
                high = middle
            else:
                low = middle + 1
        if low >= end:
            return None
        bounds.append(low)
    return tuple(reversed(bounds)) if bounds[-1] == 0 else None


def _bottleneck(build: _Builder) -> tuple[int, ...] | None:
    """The packed cut with the least slowest stage, to a thousandth; None where nothing fits."""
    best = _packed(build, float("inf"))
    if best is None or len(build.problem.stages) == 1:
        return best
    spans = list(zip(best, best[1:], strict=False))
    high = max(build.time(stage, *span) for stage, span in enumerate(spans))
    low = sum(build.time(stage, *span) for stage, span in enumerate(spans)) / len(spans) / 2
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        packed = _packed(build, middle)
        if packed is None:
            low = middle
        else:
            high, best = middle, packed
    return best


def _reachable(build: _Builder) -> tuple[int, ...] | None:
    """Any feasible cut: backward, all positions where a stage may start; forward, one path."""
    count, layers = len(build.problem.stages), len(build.problem.layers)
    starts: list[set[int]] = [set() for _ in range(count)] + [{layers}]
    for stage in range(count - 1, -1, -1):
        first = covered = stage
        for end in sorted(starts[stage + 1]):
            while first < end and not build.fits(stage, first, end):
                first += 1
            starts[stage].update(range(max(first, covered), end))
            covered = end
    if 0 not in starts[0]:
        return None
    bounds = [0]
    for stage in range(count):
        first = bounds[-1]
        ends = (end for end in sorted(starts[stage + 1], reverse=True) if end > first)
        fitting = next((end for end in ends if build.fits(stage, first, end)), None)
        if fitting is None:
            return None
        bounds.append(fitting)
    return tuple(bounds)

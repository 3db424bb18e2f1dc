"""The stage problem: what is solved for one candidate, free of any cost model.

Layers 1..L in a chain are cut into P stages; every layer takes one choice of its class.

    T_s  = sum of time_s of its layers' choices + stage time_s + cut_time_s of the cut after it
    R_s  = sum of per_step_s of its layers' choices + stage per_step_s
    M_s  = sum of (state_bytes + in_flight_s * activation_bytes) of its layers' choices
           + stage state_bytes + in_flight_s * (stage activation_bytes + carried_bytes of the cut
           before it) + max(stage workspace_bytes, workspace_bytes of its layers' choices)

    minimise   sum_weight * sum_s T_s + max_weight * max_s T_s + max_s R_s + constant_s
    subject to M_s <= capacity_bytes_s,  no stage empty,  stages contiguous

`cut_time_s` and `carried_bytes` are where skip edges are charged: a cut between the source and the
target of an edge carries its value, too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from ds_autoplan.strategy import Strategy


@dataclass(frozen=True)
class Choice:
    """One strategy of one class, priced. Seconds per micro-batch (or per step), bytes per rank."""

    time_s: float
    state_bytes: float
    activation_bytes: float
    workspace_bytes: float
    per_step_s: float = 0.0
    strategy: Strategy = Strategy()

    def dominates(self, other: Choice) -> bool:
        """No worse than `other` in any respect."""
        return (
            self.time_s <= other.time_s
            and self.state_bytes <= other.state_bytes
            and self.activation_bytes <= other.activation_bytes
            and self.workspace_bytes <= other.workspace_bytes
            and self.per_step_s <= other.per_step_s
        )


@dataclass(frozen=True)
class Stage:
    """What a stage costs beside its layers (embedding, head, what the engine allocates)."""

    capacity_bytes: float
    in_flight: float = 1.0
    time_s: float = 0.0
    per_step_s: float = 0.0
    state_bytes: float = 0.0
    activation_bytes: float = 0.0
    workspace_bytes: float = 0.0


@dataclass(frozen=True)
class Problem:
    """See the module's docstring.

    `layers` holds each layer's class; `choices` each class's choices. `cut_time_s[x]` and
    `carried_bytes[x]` belong to the cut before layer x (index 0 is no cut and stays 0).
    """

    layers: tuple[int, ...]
    choices: tuple[tuple[Choice, ...], ...]
    stages: tuple[Stage, ...]
    sum_weight: float
    max_weight: float
    constant_s: float = 0.0
    cut_time_s: tuple[float, ...] = ()
    carried_bytes: tuple[float, ...] = ()

    def cut_time(self, position: int) -> float:
        """Time of the cut before layer `position`, charged to the stage before it."""
        return self.cut_time_s[position] if self.cut_time_s else 0.0

    def carried(self, position: int) -> float:
        """Bytes that the stage starting at layer `position` keeps per micro-batch in flight."""
        return self.carried_bytes[position] if self.carried_bytes else 0.0


@dataclass(frozen=True)
class Solution:
    """A cut and a choice for each layer.

    `bounds` holds P + 1 positions: stage s runs layers bounds[s] .. bounds[s + 1] - 1. `bound_s` is
    a proven lower bound on the optimum; equal to `objective_s` where the solution is optimal.
    """

    objective_s: float
    bounds: tuple[int, ...]
    chosen: tuple[Choice, ...]
    bound_s: float
    status: str = "optimal"
    nodes: int = field(default=0, compare=False)

    @property
    def gap(self) -> float:
        """Relative distance between objective and bound."""
        if self.objective_s <= 0:
            return 0.0
        return max(0.0, (self.objective_s - self.bound_s) / self.objective_s)


def pareto(choices: tuple[Choice, ...] | list[Choice]) -> tuple[Choice, ...]:
    """The choices that no other one dominates, fastest first; of equals the first stays."""
    ordered = sorted(
        enumerate(choices),
        key=lambda item: (
            item[1].time_s,
            item[1].state_bytes,
            item[1].activation_bytes,
            item[1].workspace_bytes,
            item[1].per_step_s,
            item[0],
        ),
    )
    kept: list[Choice] = []
    for _, choice in ordered:
        if not any(other.dominates(choice) for other in kept):
            kept.append(choice)
    return tuple(kept)


def stage_time(problem: Problem, stage: int, first: int, chosen: tuple[Choice, ...]) -> float:
    """T_s of a stage that starts at layer `first` with the given choices."""
    end = first + len(chosen)
    cut = problem.cut_time(end) if end < len(problem.layers) else 0.0
    return problem.stages[stage].time_s + cut + sum(choice.time_s for choice in chosen)


def stage_bytes(problem: Problem, stage: int, first: int, chosen: tuple[Choice, ...]) -> float:
    """M_s of a stage that starts at layer `first` with the given choices."""
    own = problem.stages[stage]
    kept = own.activation_bytes + problem.carried(first)
    total = own.state_bytes + own.in_flight * kept
    total += sum(c.state_bytes + own.in_flight * c.activation_bytes for c in chosen)
    return total + max([own.workspace_bytes, *(c.workspace_bytes for c in chosen)])


def evaluate(problem: Problem, bounds: tuple[int, ...], chosen: tuple[Choice, ...]) -> float | None:
    """The objective of an assignment, or None where a stage does not fit."""
    times, per_step = [], []
    for stage, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part = chosen[first:end]
        if not part or stage_bytes(problem, stage, first, part) > _limit(problem, stage):
            return None
        times.append(stage_time(problem, stage, first, part))
        own = problem.stages[stage].per_step_s
        per_step.append(own + sum(choice.per_step_s for choice in part))
    return (
        problem.sum_weight * sum(times)
        + problem.max_weight * max(times)
        + max(per_step)
        + problem.constant_s
    )


def _limit(problem: Problem, stage: int) -> float:
    """Capacity with a rounding allowance: the same sum in another order must still fit."""
    return problem.stages[stage].capacity_bytes * (1 + 1e-12)


def fastest_times(problem: Problem) -> tuple[float, ...]:
    """For each class the time of its fastest choice."""
    return tuple(min(choice.time_s for choice in choices) for choices in problem.choices)


def lower_bound(problem: Problem) -> float:
    """A bound that ignores memory: every layer at its fastest, perfectly balanced."""
    fastest = fastest_times(problem)
    per_step = [min(choice.per_step_s for choice in choices) for choices in problem.choices]
    count = len(problem.stages)
    cuts = problem.cut_time_s[1:] if count > 1 else ()
    cut = (count - 1) * min(cuts) if cuts else 0.0
    population = Counter(problem.layers)
    total = sum(count * fastest[klass] for klass, count in population.items())
    total += cut + sum(stage.time_s for stage in problem.stages)
    step = sum(count * per_step[klass] for klass, count in population.items())
    step += sum(stage.per_step_s for stage in problem.stages)
    longest = max(stage.time_s for stage in problem.stages) + min(fastest)
    return (
        problem.sum_weight * total
        + problem.max_weight * max(total / count, longest)
        + step / count
        + problem.constant_s
    )


def prefix_counts(problem: Problem) -> list[tuple[int, ...]]:
    """For each position, how many layers of each class come before it."""
    zero = (0,) * len(problem.choices)

    def add(counts: tuple[int, ...], layer: int) -> tuple[int, ...]:
        return (*counts[:layer], counts[layer] + 1, *counts[layer + 1 :])

    return list(accumulate(problem.layers, add, initial=zero))


def missing_bytes(problem: Problem) -> float:
    """By how much even the smallest choices overflow all stages together; 0 or less: they may fit.

    A layer may sit on any stage, so each is charged where its activations weigh least.
    """
    lightest = min(stage.in_flight for stage in problem.stages)
    need = 0.0
    for klass, count in Counter(problem.layers).items():
        need += count * min(
            choice.state_bytes + lightest * choice.activation_bytes
            for choice in problem.choices[klass]
        )
    rooms = [
        stage.capacity_bytes
        - stage.state_bytes
        - stage.in_flight * stage.activation_bytes
        - stage.workspace_bytes
        for stage in problem.stages
    ]
    return max((need - sum(rooms)) / len(rooms), -min(rooms))

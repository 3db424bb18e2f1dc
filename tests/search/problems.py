"""Random stage problems, and their optimum by trying everything."""

from __future__ import annotations

import itertools
import random

from ds_autoplan.search.problem import Choice, Problem, Stage, evaluate
from ds_autoplan.strategy import Strategy


def random_problem(seed: int) -> Problem:
    """A small problem: several classes, uneven stages, memory that binds, edges that skip stages.

    Times and bytes are small integers, so that ties and exact fits are common and sums are exact.
    """
    rng = random.Random(seed)
    classes = rng.randint(1, 3)
    stages = rng.randint(1, 4)
    layers = rng.randint(stages, 7 if stages < 3 else 6)
    choices = tuple(
        tuple(_choice(rng, klass, k) for k in range(rng.randint(1, 3))) for klass in range(classes)
    )
    order = tuple(rng.randrange(classes) for _ in range(layers))
    micro_batches = rng.choice([1, 2, 4, 8, 16])
    passes = rng.choice([1, 1, 2])
    room = rng.choice([30, 60, 90, 140])
    skip = rng.random() < 0.5 and stages > 1
    return Problem(
        layers=order,
        choices=choices,
        stages=tuple(
            Stage(
                capacity_bytes=float(room + rng.randint(0, 30)),
                in_flight=float(min(micro_batches, stages - s)),
                time_s=float(rng.choice([0, 0, 3, 9])),
                per_step_s=float(rng.choice([0, 0, 5])),
                state_bytes=float(rng.randint(0, 12)),
                activation_bytes=float(rng.randint(0, 3)),
                workspace_bytes=float(rng.randint(0, 12)),
            )
            for s in range(stages)
        ),
        sum_weight=float(passes),
        max_weight=float(max(0, micro_batches - passes)),
        constant_s=float(rng.randint(0, 5)),
        cut_time_s=_per_cut(rng, layers, 4) if skip else (),
        carried_bytes=_per_cut(rng, layers, 3) if skip else (),
    )


def _per_cut(rng: random.Random, layers: int, most: int) -> tuple[float, ...]:
    """A number for the cut before each layer; there is no cut before the first."""
    return (0.0, *(float(rng.randint(0, most)) for _ in range(layers - 1)))


def _choice(rng: random.Random, klass: int, number: int) -> Choice:
    return Choice(
        time_s=float(rng.randint(3, 20)),
        state_bytes=float(rng.randint(2, 14)),
        activation_bytes=float(rng.randint(0, 8)),
        workspace_bytes=float(rng.choice([0, 2, 6, 15])),
        per_step_s=float(rng.choice([0, 1, 1, 4])),
        strategy=Strategy(attention=f"{klass}", mlp=f"{number}"),
    )


def brute_force(problem: Problem, given: tuple[int, ...] | None = None) -> float | None:
    """The least objective over every cut (or the given one) and every choice of every layer."""
    layers, count = len(problem.layers), len(problem.stages)
    assignments = list(itertools.product(*(problem.choices[klass] for klass in problem.layers)))
    best = None
    for inner in itertools.combinations(range(1, layers), count - 1):
        bounds = (0, *inner, layers)
        if given not in (None, bounds):
            continue
        for chosen in assignments:
            value = evaluate(problem, bounds, chosen)
            if value is not None and (best is None or value < best):
                best = value
    return best

"""Mixes inside stages where they are many: many layers of several classes, tight memory, steps."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from ds_autoplan.api import plan_without_help
from ds_autoplan.cluster import parse_cluster
from ds_autoplan.inputs import Inputs
from ds_autoplan.model import load_graph
from ds_autoplan.search import knapsack
from ds_autoplan.search.cut import solve_exact
from ds_autoplan.search.heuristic import construct
from ds_autoplan.search.ilp import solve_folded
from ds_autoplan.search.mix import Mixer, Room
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.search.problem import Choice, Problem, Stage, evaluate
from ds_autoplan.workload import Workload
from tests.search.problems import brute_force, random_problem


def big_problem(seed: int) -> Problem:
    """2 to 4 classes, 12 to 30 layers, 1 to 3 stages; faster choices take more bytes and steps."""
    rng = random.Random(seed)
    classes, stages = rng.randint(2, 4), rng.randint(1, 3)
    layers = tuple(sorted(rng.randrange(classes) for _ in range(rng.randint(12, 30))))
    choices = []
    for _ in range(classes):
        size, time_s = rng.uniform(5, 20), rng.uniform(1, 3)
        choices.append(
            tuple(
                Choice(
                    time_s * (1 + 0.2 * k * rng.uniform(0.5, 1.5)),
                    size / (1 + k * rng.uniform(0.5, 1.0)),
                    size / (2 + k),
                    rng.choice([0.0, 0.1, 0.2, 3.0]),
                    size * rng.choice([0.0, 0.1, 0.3]) / (1 + k),
                )
                for k in range(rng.randint(2, 5))
            )
        )
    population = [layers.count(klass) for klass in range(classes)]
    most = sum(
        n * (c[0].state_bytes + 2 * c[0].activation_bytes)
        for n, c in zip(population, choices, strict=True)
    )
    micro_batches = rng.choice([1, 4, 16])
    return Problem(
        layers=layers,
        choices=tuple(choices),
        stages=tuple(
            Stage(
                capacity_bytes=most / stages * rng.uniform(0.5, 1.3),
                in_flight=float(min(micro_batches, stages - s)),
                time_s=rng.uniform(0, 2),
                per_step_s=rng.uniform(0, 5),
            )
            for s in range(stages)
        ),
        sum_weight=1.0,
        max_weight=float(micro_batches - 1),
    )


@pytest.mark.parametrize("seed", range(60))
def test_many_layers_agree_with_highs(seed: int) -> None:
    problem = big_problem(seed)
    answer = solve_folded(problem, 30.0)
    found = solve_exact(problem, construct(problem))
    if answer.status == "infeasible":
        assert found is None
        return
    assert found is not None
    assert evaluate(problem, found.bounds, found.chosen) == found.objective_s
    assert answer.bound_s <= found.objective_s * (1 + 1e-6)
    if answer.status == "optimal":
        assert found.objective_s == pytest.approx(answer.bound_s, rel=1e-6)


def _splits(count: int, kinds: int) -> Iterator[tuple[int, ...]]:
    if kinds == 1:
        yield (count,)
        return
    for first in range(count + 1):
        for rest in _splits(count - first, kinds - 1):
            yield (first, *rest)


@pytest.mark.parametrize("seed", range(0, 400, 40))
def test_mixes_under_every_limit_agree_with_all_splits(seed: int) -> None:
    limited = 0
    for each in range(seed, seed + 40):
        rng = random.Random(each)
        counts = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 2)))
        choices = tuple(
            tuple(
                Choice(
                    float(rng.randint(1, 9)),
                    float(rng.randint(1, 9)),
                    0.0,
                    float(rng.choice([0, 0, 2, 5])),
                    float(rng.randint(0, 6)),
                )
                for _ in range(rng.randint(1, 4))
            )
            for _ in counts
        )
        room = Room(1.0, float(rng.randint(4, 60)), float(rng.choice([0, 3])))
        step = rng.choice([float("inf"), float(rng.randint(0, 30))])
        rate = rng.choice([0.5, 1.0, 3.0])
        values = rng.choice([(), ((rate, float(rng.randint(5, 60))),)])
        best = float("inf")
        for split in itertools.product(
            *(_splits(n, len(c)) for n, c in zip(counts, choices, strict=True))
        ):
            taken = [
                (choice, number)
                for each_class, numbers in zip(choices, split, strict=True)
                for choice, number in zip(each_class, numbers, strict=True)
                if number
            ]
            time_s = sum(n * c.time_s for c, n in taken)
            per_step = sum(n * c.per_step_s for c, n in taken)
            need = sum(n * c.state_bytes for c, n in taken)
            need += max(room.workspace_floor, *(c.workspace_bytes for c, _ in taken))
            over = any(time_s + r * per_step > most for r, most in values)
            if need <= room.budget and per_step <= step and not over:
                best = min(best, time_s)
        mix = Mixer(choices).fastest(counts, room, per_step_limit_s=step, values=values)
        assert (mix.time_s if mix else float("inf")) == best, each
        limited += step < float("inf") or bool(values)
    assert limited > 15


def test_the_sample_of_many_layers_is_not_trivial() -> None:
    """Memory binds in most, and fastest mixes in each stage are often not the optimum."""
    problems = [big_problem(seed) for seed in range(60)]
    starts = [construct(problem) for problem in problems]
    found = [solve_exact(problem, start) for problem, start in zip(problems, starts, strict=True)]
    pairs = [(s, f) for s, f in zip(starts, found, strict=True) if s is not None and f is not None]
    assert len(pairs) > 40
    assert sum(s.objective_s > f.objective_s * (1 + 1e-6) for s, f in pairs) > 20
    assert (
        sum(
            len({id(c) for c in f.chosen}) > len(set(p.layers))
            for p, f in zip(problems, found, strict=True)
            if f
        )
        > 25
    )


@pytest.mark.parametrize("seed", range(0, 320, 4))
def test_a_given_cut_is_solved_exactly(seed: int) -> None:
    """As interleaved stages have it; with a second per step the fastest mixes are not the best."""
    problem = random_problem(seed)
    count, layers = len(problem.stages), len(problem.layers)
    bounds = tuple(round(stage * layers / count) for stage in range(count + 1))
    truth = brute_force(problem, bounds)
    found = solve_exact(problem, construct(problem, bounds), bounds=bounds)
    if truth is None:
        assert found is None
        return
    assert found is not None
    assert found.bounds == bounds
    assert found.objective_s == pytest.approx(truth, rel=1e-6)
    answer = solve_folded(problem, bounds=bounds)
    assert answer.status == "optimal"
    assert answer.bound_s == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("seed", range(0, 320, 4))
def test_what_need_not_be_proved_states_a_bound_that_holds(seed: int) -> None:
    problem = random_problem(seed)
    truth = brute_force(problem)
    if truth is None:
        return
    for share in (0.8, 1.0, 1.2):
        found = solve_exact(problem, construct(problem), prove_below_s=truth * share)
        assert found is not None
        assert found.bound_s <= truth * (1 + 1e-9) <= found.objective_s * (1 + 2e-9)
        if share > 1:
            assert found.objective_s == pytest.approx(truth, rel=1e-6)
            assert found.gap == 0


# Each of these once took minutes or did not end. Measured in states looked at, not in seconds.
HARD = [
    ("swin-huge", 3136, 128, "1x8xA100-PCIe-80GB", "megatron", 0.2, {"pp": [1]}),
    ("swin-huge", 3136, 128, "4x8xH100-SXM-80GB", "deepspeed", 0.1, {"zero_stage": [1]}),
    ("swin-huge", 3136, 128, "4x8xH100-SXM-80GB", "deepspeed", 0.9, {"zero_stage": [1]}),
    ("t5-large", 512, 64, "1x8xA100-PCIe-80GB", "megatron", 0.6, {"pp": [1]}),
]


@pytest.mark.parametrize(("model", "seq", "batch", "place", "backend", "share", "pins"), HARD)
def test_several_classes_and_tight_memory_stay_tractable(
    model: str,
    seq: int,
    batch: int,
    place: str,
    backend: str,
    share: float,
    pins: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = 0
    plain = knapsack._Search.open

    def counted(*args: object) -> bool:
        nonlocal looked
        looked += 1
        assert looked < 1_500_000
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(knapsack._Search, "open", counted)
    cluster = parse_cluster(place)
    reserve = (1 - share) * cluster.device.memory_bytes / 1e9
    workload = Workload(seq, batch, precision="bf16", backend=backend)
    options = PlanOptions(pins=dict(pins), memory_reserve_gb=reserve)
    plan = plan_without_help(Inputs(load_graph(model), cluster, workload, options))
    assert plan.solver.gap == 0

"""Four ways to one optimum: brute force, unfolded ILP, folded ILP, decomposition."""

from __future__ import annotations

import pytest

from ds_autoplan.search.cut import solve_exact
from ds_autoplan.search.heuristic import construct
from ds_autoplan.search.ilp import solve_folded, solve_unfolded
from ds_autoplan.search.problem import (
    Choice,
    Problem,
    Stage,
    evaluate,
    lower_bound,
    missing_bytes,
)
from tests.search.problems import brute_force, random_problem

SEEDS = range(320)
CHUNK = 40


def close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(1.0, abs(a), abs(b))


@pytest.mark.parametrize("start", range(0, len(SEEDS), CHUNK))
def test_all_solvers_agree_with_brute_force(start: int) -> None:
    feasible = 0
    for seed in SEEDS[start : start + CHUNK]:
        problem = random_problem(seed)
        truth = brute_force(problem)
        found = solve_exact(problem, construct(problem))
        blind = solve_exact(problem, None)
        if not any(problem.carried_bytes):  # construction finds one if there is one
            assert (construct(problem) is None) == (truth is None), seed
        if truth is None:
            assert found is None, seed
            assert blind is None, seed
            assert solve_unfolded(problem).status == "infeasible", seed
            assert solve_folded(problem).status == "infeasible", seed
            continue
        feasible += 1
        assert missing_bytes(problem) <= 0, seed
        assert lower_bound(problem) <= truth * (1 + 1e-12), seed
        for solution in (found, blind):
            assert solution is not None, seed
            assert close(solution.objective_s, truth), seed
            assert evaluate(problem, solution.bounds, solution.chosen) == solution.objective_s
            assert solution.gap == 0
        for answer in (solve_unfolded(problem), solve_folded(problem)):
            assert answer.status == "optimal", seed
            assert answer.solution is not None, seed
            assert close(answer.solution.objective_s, truth), seed
            assert close(answer.bound_s, truth), seed
    assert feasible > CHUNK // 4  # the sample must not be trivial


def test_sample_has_what_it_should_have() -> None:
    problems = [random_problem(seed) for seed in SEEDS]
    assert sum(len(set(p.layers)) > 1 for p in problems) > 100
    assert sum(bool(p.cut_time_s) for p in problems) > 60
    assert sum(brute_force(p) is None for p in problems if len(p.layers) < 5) > 10


@pytest.mark.parametrize("seed", range(0, 320, 3))
def test_never_worse_than_the_heuristic(seed: int) -> None:
    problem = random_problem(seed)
    start = construct(problem)
    if start is None:
        return
    assert evaluate(problem, start.bounds, start.chosen) == start.objective_s
    found = solve_exact(problem, start)
    assert found is not None
    assert found.objective_s <= start.objective_s


@pytest.mark.parametrize("seed", range(0, 320, 7))
def test_a_limit_returns_only_what_beats_it(seed: int) -> None:
    problem = random_problem(seed)
    best = solve_exact(problem, construct(problem))
    if best is None:
        return
    assert solve_exact(problem, None, limit_s=best.objective_s) is None
    found = solve_exact(problem, None, limit_s=best.objective_s * 1.01 + 0.01)
    assert found is not None
    assert close(found.objective_s, best.objective_s)


def test_a_layer_that_a_stage_cannot_hold_goes_to_a_later_or_an_earlier_one() -> None:
    """Filled from the front, the small middle stage would begin at the heavy layer."""
    light, heavy = Choice(1.0, 4.0, 0.0, 0.0), Choice(1.0, 20.0, 0.0, 0.0)
    layers = (0, 0, 1, 0)
    for order, capacities in ((layers, (8.0, 5.0, 30.0)), (layers[::-1], (30.0, 5.0, 8.0))):
        stages = tuple(Stage(capacity) for capacity in capacities)
        problem = Problem(order, ((light,), (heavy,)), stages, 1.0, 3.0)
        truth = brute_force(problem)
        assert truth is not None
        for start in (None, construct(problem)):
            found = solve_exact(problem, start)
            assert found is not None
            assert close(found.objective_s, truth)


def deep_problem(layers: int, stages: int, room: float) -> Problem:
    """Equal layers, three choices as checkpointing gives, memory that binds on early stages."""
    choices = (
        Choice(1.0, 10.0, 4.0, 1.0),
        Choice(1.07, 10.0, 2.2, 2.0),
        Choice(1.33, 10.0, 0.4, 5.0),
    )
    micro_batches = 4 * stages
    return Problem(
        layers=(0,) * layers,
        choices=(choices,),
        stages=tuple(
            Stage(
                room,
                float(stages - s),
                time_s=0.4 if s == 0 else (1.3 if s == stages - 1 else 0.0),
                state_bytes=20.0 if s in (0, stages - 1) else 0.0,
                workspace_bytes=8.0 if s == stages - 1 else 0.0,
            )
            for s in range(stages)
        ),
        sum_weight=1.0,
        max_weight=micro_batches - 1.0,
        cut_time_s=(0.05,) * layers,
    )


@pytest.mark.parametrize(("layers", "stages", "room"), [(24, 4, 110.0), (32, 4, 145.0)])
def test_decomposition_equals_folded_ilp_on_deep_models(
    layers: int, stages: int, room: float
) -> None:
    problem = deep_problem(layers, stages, room)
    found = solve_exact(problem, construct(problem))
    answer = solve_folded(problem)
    assert found is not None
    assert len({choice.time_s for choice in found.chosen}) > 1  # memory binds: a mix
    assert answer.status == "optimal"
    assert close(found.objective_s, answer.bound_s)


def test_time_limited_highs_is_not_called_optimal() -> None:
    answer = solve_unfolded(deep_problem(40, 8, 150.0), time_limit_s=0.5)
    assert answer.status == "time limit reached"
    best = solve_exact(deep_problem(40, 8, 150.0), None)
    assert best is not None
    assert answer.bound_s <= best.objective_s * (1 + 1e-9)

"""The search over candidates: bound all, solve best-bound-first, stop when no bound can win.

Every candidate gets a lower bound first. They are then solved in the order of their bounds; a
candidate whose bound is not below the worst plan still worth reporting is never solved, and neither
is anything after it. Solving is exact (:mod:`ds_autoplan.search.cut`), so the best plan found is
the optimum of the space, with gap 0, unless a time limit cuts the search short. A runner-up is
proved to be slower than the best plan, not to be the fastest of its own candidate.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ds_autoplan.search.cut import solve_exact
from ds_autoplan.search.heuristic import construct
from ds_autoplan.search.pricing import Pricer
from ds_autoplan.search.problem import Problem, Solution
from ds_autoplan.search.space import Candidate, interleaved_bounds

_TIES = 1e-9  # plans this near to the fastest are proved, too, so that the simplest can win
Progress = Callable[[int, int, float | None], None]
Group = Callable[[Candidate], object]


@dataclass(frozen=True)
class Solved:
    """A candidate with its optimal solution."""

    candidate: Candidate
    problem: Problem
    solution: Solution

    @property
    def rank(self) -> tuple[Any, ...]:
        """Order of plans: time (to 10 digits), then simplicity."""
        return (float(f"{self.solution.objective_s:.10g}"), *self.candidate.simplicity)


@dataclass
class Outcome:
    """What a search found.

    `solved` are the best candidates of each group (and variants where groups are few), fastest
    first; `too_big` the candidates that do not fit, with the bytes that their tightest stage
    misses.
    """

    solved: list[Solved] = field(default_factory=list)
    too_big: list[tuple[Candidate, float]] = field(default_factory=list)
    candidates: int = 0
    tried: int = 0
    pruned: int = 0
    bound_s: float = float("inf")
    stopped: bool = False
    seconds: float = 0.0


def search(
    pricer: Pricer,
    candidates: list[Candidate],
    top_k: int,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Find the best plan and the `top_k` best of other groups.

    Args:
        pricer: prices candidates.
        candidates: the space.
        top_k: runners-up wanted, each from another (tp, pp, dp, cp, ep, vpp) as long as there are
            enough of these, then the best other variants (ZeRO stage, micro-batch, order ...).
        time_limit_s: stop after this many seconds with the best so far.
        progress: called with (done, all, best time so far).
    """
    started = time.monotonic()
    deadline = started + time_limit_s if time_limit_s is not None else None
    known: dict[Candidate, Solved] = {}
    find = partial(_search, pricer, candidates, top_k, deadline, progress, known)
    outcome = find(lambda each: each.group)
    if outcome.solved and len(outcome.solved) <= top_k and not outcome.stopped:
        others = find(lambda each: each)
        listed = {solved.candidate for solved in outcome.solved}
        variants = [solved for solved in others.solved if solved.candidate not in listed]
        outcome.solved += variants[: top_k + 1 - len(outcome.solved)]
        outcome.solved.sort(key=lambda solved: solved.rank)
    outcome.seconds = time.monotonic() - started
    return outcome


def _search(
    pricer: Pricer,
    candidates: list[Candidate],
    top_k: int,
    deadline: float | None,
    progress: Progress | None,
    known: dict[Candidate, Solved],
    group: Group,
) -> Outcome:
    """The best solution of each group, for the `top_k` + 1 best groups.

    `known` keeps the candidates' solutions from one search to the next.
    """
    # (bound, whether it is the sharper one, tie-breaker, candidate)
    queue = [
        (pricer.quick_bound_s(candidate), False, candidate.simplicity, at)
        for at, candidate in enumerate(candidates)
    ]
    heapq.heapify(queue)
    outcome = Outcome(candidates=len(queue))
    best: dict[object, Solved] = {}
    while queue:
        bound, sharp, simplicity, at = heapq.heappop(queue)
        candidate = candidates[at]
        limit = _limit(best, top_k)
        if bound >= limit:
            outcome.pruned += 1 + len(queue)
            break
        if deadline is not None and time.monotonic() > deadline and best:
            outcome.stopped = True
            outcome.bound_s = bound
            break
        own = best.get(group(candidate))
        if own is not None:
            limit = min(limit, own.solution.objective_s)
        if bound >= limit:
            outcome.pruned += 1
        elif not sharp and not best and (missing := pricer.missing_bytes(candidate)) > 0:
            outcome.too_big.append((candidate, missing))  # cheaper to see than the sharper bound
        elif not sharp:
            sharper = max(bound, pricer.bound_s(candidate))
            heapq.heappush(queue, (sharper, True, simplicity, at))
        else:
            found = known.get(candidate)
            if found is None:
                fastest = _fastest(best)
                below = float("inf") if fastest is None else fastest * (1 + _TIES)
                found = _solve(pricer, candidate, limit, below, deadline, outcome)
            outcome.tried += 1
            if found is not None:
                known[candidate] = found
            if found is not None and (own is None or found.rank < own.rank):
                best[group(candidate)] = found
        if progress is not None:
            progress(len(candidates) - len(queue), len(candidates), _fastest(best))
    outcome.solved = sorted(best.values(), key=lambda solved: solved.rank)
    if outcome.solved:
        winner = outcome.solved[0].solution
        bounds = [winner.bound_s] + ([outcome.bound_s] if outcome.stopped else [])
        outcome.bound_s = min(bounds)
    return outcome


def _limit(best: dict[object, Solved], top_k: int) -> float:
    """The objective that a candidate must beat to be reported at all."""
    values = sorted(solved.solution.objective_s for solved in best.values())
    return values[top_k] if len(values) > top_k else float("inf")


def _fastest(best: dict[object, Solved]) -> float | None:
    return min((solved.solution.objective_s for solved in best.values()), default=None)


def _solve(
    pricer: Pricer,
    candidate: Candidate,
    limit_s: float,
    prove_below_s: float,
    deadline: float | None,
    outcome: Outcome,
) -> Solved | None:
    missing = pricer.missing_bytes(candidate)
    if missing > 0:
        outcome.too_big.append((candidate, missing))
        return None
    problem = pricer.problem(candidate)
    degrees = candidate.degrees
    bounds = interleaved_bounds(len(problem.layers), degrees) if degrees.vpp > 1 else None
    # a limit prunes as well as a constructed start does, and costs nothing
    start = construct(problem, bounds) if limit_s == float("inf") else None
    if start is None and limit_s == float("inf") and not any(problem.carried_bytes):
        solution = None  # construction would have found one
    else:
        solution = solve_exact(problem, start, deadline, limit_s, prove_below_s, bounds)
    if solution is None and limit_s == float("inf"):
        outcome.too_big.append((candidate, 0.0))
    return Solved(candidate, problem, solution) if solution is not None else None

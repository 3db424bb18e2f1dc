"""One case over the pool: train under the plan, train the reference, compare. No torch here."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import Any

from ds_autoplan.integrations.verification.pool import REFEREE, Pool


@dataclass(frozen=True)
class Comparison:
    """How far a run under a plan is from the reference; all differences are relative.

    `losses` and `reference_losses` are means over ranks, one per call.
    """

    max_loss_rel_diff: float
    max_grad_norm_rel_diff: float
    max_weight_rel_diff: float
    worst_tensor: str
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]


def run_trial(
    pool: Pool,
    job: dict[str, Any],
    plan_file: str,
    *,
    zero_stage: int,
    precision: str,
    disturb: str,
    limit_s: float,
) -> Comparison:
    """Train and compare.

    Args:
        pool: the processes.
        job: the fields of a `training.Job`.
        plan_file: where the plan is.
        zero_stage: the stage the script's own config asks for.
        precision: "fp32" or "bf16".
        disturb: what to break on purpose, "" for nothing.
        limit_s: seconds after which the case counts as hung.

    Raises:
        CaseFailed: it raised or hung.
    """
    number = pool.next_case()
    folder = pool.folder / f"case_{number}"
    request = {
        "job": job,
        "plan": plan_file,
        "rendezvous": str(pool.folder / f"rendezvous_{number}"),
        "folder": str(folder),
        "zero_stage": zero_stage,
        "precision": precision,
        "disturb": disturb,
    }
    requests: dict[int, dict[str, Any]] = {rank: request for rank in range(job["world"])}
    try:
        answers = pool.ask({**requests, REFEREE: {"train": job}}, limit_s)
        weights = pool.ask({REFEREE: {"compare": job, "folder": str(folder)}}, limit_s)[REFEREE]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    reference = answers.pop(REFEREE)
    ranks = [answers[rank] for rank in range(job["world"])]
    losses = [list(call) for call in zip(*(rank["losses"] for rank in ranks), strict=True)]
    expected = reference["losses"]
    pairs = [
        (found, wanted)
        for found_row, wanted_row in zip(losses, expected, strict=True)
        for found, wanted in zip(found_row, wanted_row, strict=True)
    ]
    norms = [
        (norm, wanted)
        for rank in ranks
        for norm, wanted in zip(rank["norms"], reference["norms"], strict=True)
    ]
    return Comparison(
        max_loss_rel_diff=_largest(pairs),
        max_grad_norm_rel_diff=_largest(norms),
        max_weight_rel_diff=weights["max_weight_rel_diff"],
        worst_tensor=weights["tensor"],
        losses=tuple(sum(row) / len(row) for row in losses),
        reference_losses=tuple(sum(row) / len(row) for row in expected),
    )


def _largest(pairs: list[tuple[float, float]]) -> float:
    differences = [abs(found - wanted) / abs(wanted) for found, wanted in pairs]
    return math.nan if any(map(math.isnan, differences)) else max(differences)

"""Dropout under tensor parallelism: replicated parts drop alike, sharded parts differently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.strategy import Strategy
from tests.distributed.by_hand import plan_by_hand
from tests.distributed.pool import CONFIG, Pool

pytestmark = pytest.mark.distributed

SCRIPT = "tests.distributed.scripts.dropout:train"
SAMPLES, LENGTH, WIDTH = 8, 12, 32


def run(pool: Pool, folder: Path, strategy: Strategy, **plan: Any) -> list[Any]:
    sizes: dict[str, Any] = {"tp": 4, "micro_batch_size": 8, **plan}
    planned = plan_by_hand(4, global_batch_size=8, strategy=strategy, **sizes)
    planned.save(folder / "plan.json")
    return pool.run(SCRIPT, {**CONFIG, "autoplan": {"plan": str(folder / "plan.json")}})


def masks(results: list[Any], shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """For each dropout of that shape in the first call, the ranks' masks."""
    every = [[digest for size, digest in result["masks"] if size == shape] for result in results]
    assert len({len(item) for item in every}) == 1
    return list(zip(*every, strict=True))


def test_sharded_heads_drop_differently_and_the_rest_alike(pool: Pool, tmp_path: Path) -> None:
    results = run(pool, tmp_path, Strategy())
    attention = masks(results, (SAMPLES, 1, LENGTH, LENGTH))
    hidden = masks(results, (SAMPLES, LENGTH, WIDTH))
    assert len(attention) == 4 and len(hidden) == 1 + 2 * 4
    assert all(len(set(ranks)) == 4 for ranks in attention)
    assert all(len(set(ranks)) == 1 for ranks in hidden)
    assert len({ranks[0] for ranks in hidden}) == len(hidden), "no mask is used twice"
    weights = [result["weights"] for result in results]
    assert weights[0] and all(item == weights[0] for item in weights)
    assert all(result["untouched"] for result in results), "the script's own random state"


def test_pieces_of_the_sequence_drop_differently(pool: Pool, tmp_path: Path) -> None:
    results = run(pool, tmp_path, Strategy(sequence_parallel=True))
    pieces = masks(results, (SAMPLES, LENGTH // 4, WIDTH))
    assert len(pieces) == 2 * 4
    assert all(len(set(ranks)) == 4 for ranks in pieces)
    (embedding,) = masks(results, (SAMPLES, LENGTH, WIDTH))
    assert len(set(embedding)) == 1
    weights = [result["weights"] for result in results]
    assert weights[0] and all(item == weights[0] for item in weights)


def test_replicated_attention_drops_alike_under_sequence_parallelism(
    pool: Pool, tmp_path: Path
) -> None:
    results = run(pool, tmp_path, Strategy(attention="replicate", sequence_parallel=True))
    attention = masks(results, (SAMPLES, 4, LENGTH, LENGTH))
    assert len(attention) == 4
    assert all(len(set(ranks)) == 1 for ranks in attention)
    pieces = masks(results, (SAMPLES, LENGTH // 4, WIDTH))
    assert len(pieces) == 2 * 4
    assert all(len(set(ranks)) == 4 for ranks in pieces)
    weights = [result["weights"] for result in results]
    assert weights[0] and all(item == weights[0] for item in weights)


@pytest.mark.parametrize("mode", ["full", pytest.param("selective", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"tp": 4, "micro_batch_size": 2}, marks=pytest.mark.full),
        {"tp": 2, "pp": 2, "micro_batch_size": 2},
    ],
    ids=["tp4_cut", "tp2xpp2"],
)
@pytest.mark.parametrize(
    "strategy",
    [
        {},
        pytest.param({"sequence_parallel": True}, marks=pytest.mark.full),
        {"attention": "replicate", "sequence_parallel": True},
    ],
    ids=["tensor", "sequence", "replicated_attention"],
)
def test_recomputation_draws_the_same_masks(
    pool: Pool, strategy: dict[str, Any], plan: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    kept = run(pool, tmp_path, Strategy(**strategy), **plan)
    again = run(pool, tmp_path, Strategy(activation_checkpointing=mode, **strategy), **plan)
    for one, other in zip(kept, again, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-6)

"""Save, stop, load, go on: the losses of an uninterrupted run, and weights that open anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.strategy import Strategy
from tests.distributed.by_hand import plan_by_hand
from tests.distributed.pool import Pool, RanksFailed

pytestmark = pytest.mark.distributed

WORLD, MICRO, LAYERS = 4, 2, 4
SCRIPTS = "tests.distributed.scripts.checkpoints"

PLANS: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4, "micro_batch_size": 8},
    "tp2xdp2_zero0": {"tp": 2, "dp": 2, "micro_batch_size": 4},
    "tp2xdp2_zero1": {"tp": 2, "dp": 2, "micro_batch_size": 4, "zero_stage": 1},
    "tp2xdp2_zero2": {"tp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 2},
    "tp2xdp2_zero3": {"tp": 2, "dp": 2, "micro_batch_size": 4, "zero_stage": 3},
    "dp4_zero3": {"dp": 4, "micro_batch_size": 2, "zero_stage": 3},
    "pp2xdp2_zero0": {"pp": 2, "dp": 2, "micro_batch_size": 2},
    "pp2xdp2_zero1": {"pp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 1},
    "tp2xpp2_zero1": {
        "tp": 2,
        "pp": 2,
        "micro_batch_size": 2,
        "zero_stage": 1,
        "strategy": Strategy(sequence_parallel=True),
    },
    "pp4": {"pp": 4, "micro_batch_size": 2},
}
SMALL = ("tp2xdp2_zero0", "tp2xdp2_zero2", "tp2xdp2_zero3", "pp2xdp2_zero1", "tp2xpp2_zero1")


def config_for(plan: str | None, folder: Path) -> dict[str, Any]:
    """A user's JSON, under a plan or under none."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
    }
    if plan is not None:
        planned = plan_by_hand(LAYERS, global_batch_size=MICRO * WORLD, **PLANS[plan])
        planned.save(folder / f"{plan}.json")
        config["autoplan"] = {"plan": str(folder / f"{plan}.json")}
    return config


@pytest.fixture(scope="module")
def reference(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The uninterrupted run without a plan, and what it saved."""
    folder = tmp_path_factory.mktemp("reference")
    config = config_for(None, folder)
    return folder, pool.run(f"{SCRIPTS}:save_and_go_on", config, str(folder))


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=[] if p in SMALL else [pytest.mark.full]) for p in PLANS]
)
def test_resumed_run_goes_on_as_the_uninterrupted_one(
    pool: Pool, reference: tuple[Path, list[Any]], plan: str, tmp_path: Path
) -> None:
    expected_folder, expected = reference
    config = config_for(plan, tmp_path)
    folder = tmp_path / "saved"
    whole = pool.run(f"{SCRIPTS}:save_and_go_on", config, str(folder))
    resumed = pool.run(f"{SCRIPTS}:load_and_go_on", config, str(folder))
    for rank in range(WORLD):
        assert whole[rank]["losses"] == pytest.approx(expected[rank]["losses"], rel=1e-5)
        assert resumed[rank]["losses"] == pytest.approx(expected[rank]["losses"], rel=1e-5)
        assert resumed[rank]["rates"] == pytest.approx(expected[rank]["rates"], rel=1e-9)
        assert (resumed[rank]["epoch"], resumed[rank]["step"]) == (7, 2)
        assert whole[rank]["saved"] is True
    forms = pool.run(f"{SCRIPTS}:saved_alike", str(folder), str(expected_folder))[0]
    zero_3 = PLANS[plan].get("zero_stage") == 3
    assert set(forms) == {"by_all", "one_file"} | (set() if zero_3 else {"by_rank_0"})
    assert max(forms.values()) < 1e-4


def test_tied_weights_resume(pool: Pool, tmp_path: Path) -> None:
    config = config_for("tp2xpp2_zero1", tmp_path)
    tied = {"tie_word_embeddings": True}
    whole = pool.run(f"{SCRIPTS}:save_and_go_on", config, str(tmp_path / "saved"), **tied)
    resumed = pool.run(f"{SCRIPTS}:load_and_go_on", config, str(tmp_path / "saved"), **tied)
    for rank in range(WORLD):
        assert resumed[rank]["losses"] == pytest.approx(whole[rank]["losses"], rel=1e-6)


def test_another_plan_starts_from_the_saved_weights(
    pool: Pool, reference: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    pool.run(f"{SCRIPTS}:save_and_go_on", config_for("tp4", tmp_path), str(folder))
    results = [
        pool.run(f"{SCRIPTS}:start_from_weights", config_for(plan, tmp_path), str(weights))
        for plan, weights in (
            ("tp2xpp2_zero1", folder / "by_rank_0"),
            (None, reference[0] / "by_all"),
        )
    ]
    for planned, plain in zip(*results, strict=True):
        assert planned["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_checkpoint_of_another_layout_is_refused(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    pool.run(f"{SCRIPTS}:save_and_go_on", config_for("tp4", tmp_path), str(folder))
    with pytest.raises(RanksFailed) as failed:
        pool.run(f"{SCRIPTS}:load_and_go_on", config_for("tp2xpp2_zero1", tmp_path), str(folder))
    assert all(error is not None for error in failed.value.errors)
    for kind, message, _ in failed.value.errors:
        assert kind == "UnsupportedError"
        assert "was saved under tp 4 x pp 1 (stages of layers 0-3; 4 layers sharded" in message
        assert "this job runs under tp 2 x pp 2 (stages of layers 0-1, 2-3;" in message
        assert "save_pretrained in the first job, from_pretrained in this one." in message


@pytest.mark.parametrize("plan", ["tp2xdp2_zero1", "tp2xpp2_zero1"])
def test_every_rank_can_read_the_state_dict(pool: Pool, plan: str, tmp_path: Path) -> None:
    plain = pool.run(f"{SCRIPTS}:read_everywhere", config_for(None, tmp_path))
    planned = pool.run(f"{SCRIPTS}:read_everywhere", config_for(plan, tmp_path))
    for mine, expected in zip(planned, plain, strict=True):
        assert mine == pytest.approx(expected, rel=1e-5)

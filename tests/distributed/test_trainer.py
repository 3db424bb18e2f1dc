"""An unchanged Hugging Face Trainer script logs and saves the same under a plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.strategy import Strategy
from tests.distributed.by_hand import plan_by_hand
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

WORLD, MICRO, LAYERS = 4, 2, 4
SCRIPT = "tests.distributed.scripts.trainer:train"
ZERO_3 = {
    "stage": 3,
    "stage3_gather_16bit_weights_on_model_save": True,
    "stage3_param_persistence_threshold": 0,
}
RESUME = "tests.distributed.scripts.trainer:resume"
ACCELERATE = "tests.distributed.scripts.with_accelerate:train"

PLANS: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4, "micro_batch_size": 8},
    "tp4_cut": {"tp": 4, "micro_batch_size": 2, "strategy": Strategy(sequence_parallel=True)},
    "tp2xdp2": {"tp": 2, "dp": 2, "micro_batch_size": 4, "zero_stage": 1},
    "tp2xdp2_cut_zero2": {"tp": 2, "dp": 2, "micro_batch_size": 1, "zero_stage": 2},
    "tp2xdp2_zero3": {"tp": 2, "dp": 2, "micro_batch_size": 4, "zero_stage": 3},
    "pp2xdp2": {"pp": 2, "dp": 2, "micro_batch_size": 2, "zero_stage": 1},
    "tp2xpp2": {"tp": 2, "pp": 2, "micro_batch_size": 2},
    "pp4": {"pp": 4, "micro_batch_size": 1},
}
SMALL = (("tp4", 1), ("tp2xdp2", 3), ("tp2xdp2_cut_zero2", 1), ("pp2xdp2", 3), ("tp2xpp2", 1))


def deepspeed_config(**more: Any) -> dict[str, Any]:
    """A JSON as the documentation of Transformers shows it: "auto" wherever it may stand."""
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 0,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": "auto",
                "betas": "auto",
                "eps": "auto",
                "weight_decay": "auto",
                "torch_adam": True,
            },
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
            },
        },
        "steps_per_print": 1000000,
        **more,
    }


class References:
    """What the script logs without a plan; run once for each accumulation."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.known: dict[int, list[Any]] = {}

    def get(self, accumulation: int) -> list[Any]:
        if accumulation not in self.known:
            folder = str(self.folder / str(accumulation))
            # ZeRO stage 1 has a gradient norm to log; stage 0 in fp32 has none.
            config = deepspeed_config(zero_optimization={"stage": 1})
            self.known[accumulation] = self.pool.run(SCRIPT, folder, config, accumulation)
        return self.known[accumulation]


@pytest.fixture(scope="module")
def references(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(pool, tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize(
    ("plan", "accumulation"),
    [
        pytest.param(plan, steps, marks=[] if (plan, steps) in SMALL else [pytest.mark.full])
        for plan in PLANS
        for steps in (1, 3)
    ],
)
def test_same_log_and_same_checkpoint(
    pool: Pool, references: References, plan: str, accumulation: int, tmp_path: Path
) -> None:
    planned = plan_by_hand(LAYERS, global_batch_size=MICRO * WORLD * accumulation, **PLANS[plan])
    planned.save(tmp_path / "plan.json")
    config = deepspeed_config(autoplan={"plan": str(tmp_path / "plan.json")})
    results = pool.run(SCRIPT, str(tmp_path / "model"), config, accumulation)
    for rank, (result, expected) in enumerate(
        zip(results, references.get(accumulation), strict=True)
    ):
        for name in ("losses", "rates", "norms"):
            assert result[name] == pytest.approx(expected[name], rel=2e-5), f"{name}, rank {rank}"
        for name in ("eval_loss", "reopened"):
            assert result[name] == pytest.approx(expected[name], rel=1e-5), f"{name}, rank {rank}"
        for name in ("names", "steps", "batch"):
            assert result[name] == expected[name], f"{name}, rank {rank}"


@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=[] if p == "tp2xpp2" else [pytest.mark.full]) for p in PLANS]
)
def test_a_trainer_resumes_from_its_checkpoint(pool: Pool, plan: str, tmp_path: Path) -> None:
    planned = plan_by_hand(LAYERS, global_batch_size=MICRO * WORLD, **PLANS[plan])
    planned.save(tmp_path / "plan.json")
    zero = {"stage": PLANS[plan].get("zero_stage", 0)}
    config = deepspeed_config(
        autoplan={"plan": str(tmp_path / "plan.json")}, zero_optimization=zero
    )
    for result in pool.run(RESUME, str(tmp_path / "model"), config, 1):
        assert len(result["whole"]) == 4
        assert result["resumed"] == pytest.approx(result["whole"], rel=1e-6)


@pytest.fixture(scope="module")
def loaded(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """A checkpoint, and what training on from it gives under DeepSpeed's ZeRO-3 alone."""
    folder = tmp_path_factory.mktemp("loaded")
    start = str(folder / "start")
    pool.run(SCRIPT, start, deepspeed_config(), 1)
    config = deepspeed_config(zero_optimization=ZERO_3)
    return start, pool.run(SCRIPT, str(folder / "plain"), config, 1, start=start)


@pytest.mark.parametrize("plan", ["tp2xdp2_zero3", "tp2xpp2", "tp2xdp2_cut_zero2"])
def test_a_model_loaded_under_zero_3(
    pool: Pool, loaded: tuple[str, list[Any]], plan: str, tmp_path: Path
) -> None:
    """Transformers cuts it over all ranks before DeepSpeed is called; the plan cuts otherwise."""
    planned = plan_by_hand(LAYERS, global_batch_size=MICRO * WORLD, **PLANS[plan])
    planned.save(tmp_path / "plan.json")
    config = deepspeed_config(
        autoplan={"plan": str(tmp_path / "plan.json")}, zero_optimization=ZERO_3
    )
    start, plain = loaded
    results = pool.run(SCRIPT, str(tmp_path / "model"), config, 1, start=start)
    for result, expected in zip(results, plain, strict=True):
        assert result["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        for name in ("eval_loss", "reopened"):
            assert result[name] == pytest.approx(expected[name], rel=1e-5), name
        assert result["names"] == expected["names"]


@pytest.fixture(scope="module")
def plain_accelerate(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[Any]]:
    """What the accelerate script gives without a plan."""
    folder = tmp_path_factory.mktemp("accelerate")

    @functools.cache
    def run(accumulation: int) -> list[Any]:
        config = accelerate_config(zero_optimization={"stage": 1})
        return pool.run(ACCELERATE, str(folder / str(accumulation)), config, accumulation)

    return run


def accelerate_config(**more: Any) -> dict[str, Any]:
    """A JSON without an optimizer: the script makes it."""
    config = deepspeed_config(**more)
    return {
        name: value
        for name, value in {**config, "gradient_clipping": 0.7}.items()
        if name not in ("optimizer", "scheduler", "bf16")
    }


@pytest.mark.parametrize(
    ("plan", "accumulation"),
    [
        pytest.param(plan, steps, marks=[] if (plan, steps) in SMALL[1:4] else [pytest.mark.full])
        for plan in PLANS
        for steps in (1, 3)
    ],
)
def test_accelerate_gives_the_same(
    pool: Pool,
    plain_accelerate: Callable[[int], list[Any]],
    plan: str,
    accumulation: int,
    tmp_path: Path,
) -> None:
    planned = plan_by_hand(LAYERS, global_batch_size=MICRO * WORLD * accumulation, **PLANS[plan])
    planned.save(tmp_path / "plan.json")
    config = accelerate_config(autoplan={"plan": str(tmp_path / "plan.json")})
    results = pool.run(ACCELERATE, str(tmp_path / "model"), config, accumulation)
    for rank, (result, expected) in enumerate(
        zip(results, plain_accelerate(accumulation), strict=True)
    ):
        for name, value in expected.items():
            assert result[name] == pytest.approx(value, rel=2e-5), f"{name}, rank {rank}"

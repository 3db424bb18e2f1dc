"""An unchanged script gives the same losses with "autoplan" in its config as without.

The reference is DeepSpeed itself: the same script, the same config without the key, plain data
parallelism over the same four ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.strategy import Strategy
from tests.distributed.by_hand import plan_by_hand
from tests.distributed.pool import Pool

pytestmark = pytest.mark.distributed

WORLD, MICRO, LAYERS = 4, 2, 4
SCRIPTS = "tests.distributed.scripts.loops"
RELATIVE = 1e-5

# A call brings MICRO samples of each rank to a replica; "b" is how many of them run at a time.
PLANS: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4, "b": 8},
    "tp4_cut": {"tp": 4, "b": 2, "strategy": Strategy(sequence_parallel=True)},
    "pp4": {"pp": 4, "b": 2},
    "pp4_uneven_in_one": {"pp": 4, "b": 8, "bounds": [(0, 1), (1, 2), (2, 3), (3, 4)]},
    "tp2xpp2": {"tp": 2, "pp": 2, "b": 2, "strategy": Strategy(sequence_parallel=True)},
    "tp2xpp2_zero1": {"tp": 2, "pp": 2, "b": 1, "zero_stage": 1, "bounds": [(0, 3), (3, 4)]},
    "tp2xdp2": {"tp": 2, "dp": 2, "b": 4, "zero_stage": 1},
    "tp2xdp2_zero3": {"tp": 2, "dp": 2, "b": 4, "zero_stage": 3},
    "tp2xdp2_cut_zero2": {"tp": 2, "dp": 2, "b": 1, "zero_stage": 2},
    "pp2xdp2": {"pp": 2, "dp": 2, "b": 2},
    "pp2xdp2_zero1": {
        "pp": 2,
        "dp": 2,
        "b": 1,
        "zero_stage": 1,
        "strategy": Strategy(activation_checkpointing="full"),
    },
    "dp4": {"dp": 4, "b": 2},
    "dp4_cut": {"dp": 4, "b": 1, "zero_stage": 1},
}
ASKED_FOR = ("tp4", "pp4", "tp2xpp2", "tp2xdp2", "pp2xdp2", "dp4")


def config_for(accumulation: int) -> dict[str, Any]:
    """The user's JSON, without the key."""
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000000,
    }


def with_plan(config: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """The same JSON with a pinned plan, and the ZeRO stage the plan has."""
    degrees = dict(PLANS[name])
    plan = plan_by_hand(
        LAYERS,
        micro_batch_size=degrees.pop("b"),
        global_batch_size=MICRO * WORLD * config["gradient_accumulation_steps"],
        **degrees,
    )
    plan.save(folder / "plan.json")
    return {**config, "autoplan": {"plan": str(folder / "plan.json")}}


class References:
    """What each script gives without a plan; run once."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.known: dict[tuple[str, int], list[Any]] = {}

    def get(self, script: str, accumulation: int) -> list[Any]:
        key = (script, accumulation)
        if key not in self.known:
            # Under ZeRO stage 1 DeepSpeed keeps the gradient norm; in fp32 without it, it does not.
            config = {**config_for(accumulation), "zero_optimization": {"stage": 1}}
            self.known[key] = self.pool.run(f"{SCRIPTS}:{script}", config)
        return self.known[key]


@pytest.fixture(scope="module")
def references(pool: Pool) -> References:
    return References(pool)


def flat(values: Any) -> list[float]:
    """Numbers of nested lists, in order."""
    if isinstance(values, (int, float)):
        return [float(values)]
    return [number for value in values for number in flat(value)]


def check(pool: Pool, references: References, script: str, plan: str, steps: int, to: Path) -> None:
    expected = references.get(script, steps)
    results = pool.run(f"{SCRIPTS}:{script}", with_plan(config_for(steps), plan, to))
    for rank, (result, reference) in enumerate(zip(results, expected, strict=True)):
        assert result.keys() == reference.keys()
        for name, value in reference.items():
            where = f"{name} on rank {rank}"
            if name == "norms":
                # A wrong scale is a whole factor; rounding in the weights shows in norms earlier.
                assert result[name] == pytest.approx(value, rel=10 * RELATIVE), where
            elif name in ("losses", "evaluated", "rates", "last_rates", "returned"):
                assert flat(result[name]) == pytest.approx(flat(value), rel=RELATIVE), where
            else:
                assert result[name] == value, where
    losses = flat([result["losses"] for result in expected])
    assert len(set(losses)) == len(losses), "losses that repeat cannot tell ranks and steps apart"


def cases(script: str, small: list[tuple[str, int]]) -> list[Any]:
    """Every plan with accumulation 1 and 3; those not in `small` run with the long tests."""
    marked = []
    for plan in PLANS:
        for steps in (1, 3):
            marks = [] if (plan, steps) in small else [pytest.mark.full]
            marked.append(pytest.param(plan, steps, marks=marks, id=f"{script}-{plan}-{steps}"))
    return marked


ASKED_CASES = [(plan, steps) for plan in ASKED_FOR for steps in (1, 3)]


@pytest.mark.parametrize(
    ("plan", "steps"),
    cases("client", [*ASKED_CASES, ("tp2xpp2_zero1", 3), ("tp2xdp2_cut_zero2", 3), ("tp4_cut", 1)]),
)
def test_client_optimizer(
    pool: Pool, references: References, plan: str, steps: int, tmp_path: Path
) -> None:
    check(pool, references, "client_optimizer", plan, steps, tmp_path)


@pytest.mark.parametrize(
    ("plan", "steps"), cases("json", [("tp4", 1), ("tp2xpp2", 3), ("tp2xdp2_zero3", 1)])
)
def test_json_optimizer(
    pool: Pool, references: References, plan: str, steps: int, tmp_path: Path
) -> None:
    check(pool, references, "json_optimizer", plan, steps, tmp_path)


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        case
        for case in cases("logits", [("tp4", 1), ("tp2xdp2", 3), ("dp4_cut", 1), ("tp4_cut", 3)])
        if PLANS[case.values[0]].get("pp", 1) == 1
    ],
)
def test_loss_from_logits(
    pool: Pool, references: References, plan: str, steps: int, tmp_path: Path
) -> None:
    check(pool, references, "loss_from_logits", plan, steps, tmp_path)


@pytest.mark.parametrize(
    ("plan", "steps"), cases("data", [("tp4", 1), ("pp2xdp2", 1), ("tp2xpp2", 3)])
)
def test_training_data(
    pool: Pool, references: References, plan: str, steps: int, tmp_path: Path
) -> None:
    check(pool, references, "given_training_data", plan, steps, tmp_path)


@pytest.mark.parametrize(
    ("plan", "steps"), cases("eval", [("tp2xdp2", 1), ("pp4", 1), ("tp2xpp2", 3), ("dp4_cut", 1)])
)
def test_evaluating(
    pool: Pool, references: References, plan: str, steps: int, tmp_path: Path
) -> None:
    check(pool, references, "evaluating", plan, steps, tmp_path)


@pytest.mark.parametrize(
    ("plan", "steps"), cases("uneven", [("tp4", 1), ("pp4", 1), ("tp2xpp2", 3), ("tp2xdp2", 1)])
)
def test_uneven_batches(
    pool: Pool, references: References, plan: str, steps: int, tmp_path: Path
) -> None:
    check(pool, references, "uneven", plan, steps, tmp_path)


@pytest.mark.parametrize(
    ("plan", "steps"), cases("weighted", [("tp2xpp2", 1), ("tp2xdp2_cut_zero2", 3), ("tp4_cut", 1)])
)
def test_weighted_losses(
    pool: Pool, references: References, plan: str, steps: int, tmp_path: Path
) -> None:
    check(pool, references, "weighted", plan, steps, tmp_path)

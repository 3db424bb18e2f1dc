"""`verify` at work: the small grid, the full one, and what it must notice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ds_autoplan.integrations.verification.pool import CaseFailed, Pool
from ds_autoplan.integrations.verification.trial import run_trial

from ds_autoplan.cli import main
from ds_autoplan.verify import Case, Result, _prepare, parse_case, verify
from tests.distributed.by_hand import plan_by_hand
from tests.distributed.grids import OTHERS, full_grid, other_grid, small_grid

SMALL = {case["name"]: case for case in small_grid() + other_grid(1)}
FULL = {case["name"]: case for case in full_grid() + other_grid(len(OTHERS))}
LIMIT_S = 240.0
TINY = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def _run(grid: dict[str, dict[str, Any]]) -> dict[str, Result]:
    cases = [parse_case(data, name) for name, data in grid.items()]
    return {result.case.name: result for result in verify(cases, limit_s=LIMIT_S)}


@pytest.fixture(scope="module")
def small_results() -> dict[str, Result]:
    return _run(SMALL)


class Lazily:
    """Results of a grid, run a hundred cases at a time when the first of them is asked for."""

    def __init__(self, grid: dict[str, dict[str, Any]]) -> None:
        names = list(grid)
        parts = [names[at : at + 100] for at in range(0, len(names), 100)]
        self.part_of = {
            name: {each: grid[each] for each in part} for part in parts for name in part
        }
        self.results: dict[str, Result] = {}

    def __getitem__(self, name: str) -> Result:
        if name not in self.results:
            self.results |= _run(self.part_of[name])
        return self.results[name]


@pytest.fixture(scope="module")
def full_results() -> Lazily:
    return Lazily(FULL)


def _check(result: Result) -> None:
    shown = {**result.to_json(), "plan": None, "details": ""}
    assert result.ok, f"{json.dumps(shown)}\n{result.details}"


@pytest.mark.distributed
@pytest.mark.parametrize("name", SMALL)
def test_small_grid(name: str, small_results: dict[str, Result]) -> None:
    _check(small_results[name])


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("name", FULL)
def test_full_grid(name: str, full_results: Lazily) -> None:
    _check(full_results[name])


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The command on a grid of runs that are disturbed on purpose, between runs that are not."""
    folder = tmp_path_factory.mktemp("disturbed")
    other = folder / "six_layers.json"
    plan_by_hand(6, tp=2, global_batch_size=4, micro_batch_size=4).save(other)
    common = {"model": "llama", "tp": 2, "steps": 2, "config": TINY}
    three = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}
    biased = {**common, "model": "qwen2", "config": three}
    cases = [
        {**common, "name": "shard", "disturb": "shard"},
        {**common, "name": "gradient", "disturb": "gradient"},
        {**common, "name": "late", "disturb": "late"},
        {**common, "name": "another model's plan", "plan": str(other)},
        {**common, "name": "undisturbed"},
        {**common, "name": "pipeline after that", "tp": 1, "pp": 2},
        {**common, "name": "bf16", "precision": "bf16", "zero_stage": 1},
        # DeepSpeed's ZeRO-3 leaves its own linear in the two ranks that it ran on.
        {**biased, "name": "ZeRO 3 on two", "tp": 1, "dp": 2, "zero_stage": 3},
        {**biased, "name": "ZeRO 2 on four", "dp": 2, "zero_stage": 2, "sequence_parallel": True},
    ]
    grid = folder / "grid.jsonl"
    grid.write_text("\n".join(json.dumps(case) for case in cases))
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *a, file=None, **_: file or printed.append(a[0]))
        status = main(["verify", "--json", "--grid", str(grid), "--timeout", str(LIMIT_S)])
    answer = json.loads(printed[0])
    yield {"status": status, "answer": answer, **{r["name"]: r for r in answer["results"]}}


@pytest.mark.distributed
def test_a_broken_shard_is_seen(disturbed: dict[str, Any]) -> None:
    result = disturbed["shard"]
    assert not result["ok"] and result["max_loss_rel_diff"] > 1e-4


@pytest.mark.distributed
def test_a_wrong_gradient_is_seen(disturbed: dict[str, Any]) -> None:
    """The first loss is right then, the weights are not: an update must depend on the scale."""
    result = disturbed["gradient"]
    assert not result["ok"] and result["max_weight_rel_diff"] > 1e-3
    assert result["worst_tensor"] == "model.layers.0.input_layernorm.weight"
    assert result["loss"][0] == pytest.approx(result["reference_loss"][0], rel=1e-5)


@pytest.mark.distributed
def test_ranks_that_are_late_save_the_same_weights(disturbed: dict[str, Any]) -> None:
    """The first rank asks for shards to save before the others have made their last step."""
    assert disturbed["late"]["ok"]


@pytest.mark.distributed
def test_a_case_that_raises_is_an_answer_and_the_pool_goes_on(disturbed: dict[str, Any]) -> None:
    failed = disturbed["another model's plan"]
    assert not failed["ok"]
    assert "6 layers" in failed["error"] and "rank" not in failed["error"].split(":")[0]
    assert disturbed["undisturbed"]["ok"] and disturbed["pipeline after that"]["ok"]
    assert disturbed["bf16"]["ok"], disturbed["bf16"]


@pytest.mark.distributed
def test_the_status_says_that_one_case_failed(disturbed: dict[str, Any]) -> None:
    assert disturbed["status"] == 1
    assert disturbed["answer"]["passed"] == 6 and disturbed["answer"]["cases"] == 9


@pytest.mark.distributed
def test_a_case_leaves_nothing_for_later_ones_on_more_ranks(disturbed: dict[str, Any]) -> None:
    assert disturbed["ZeRO 3 on two"]["ok"]
    assert disturbed["ZeRO 2 on four"]["ok"]


@pytest.mark.distributed
def test_one_case_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-3-8b", "--tp", "2", "--sequence-parallel", "--steps", "2", "--json"]
    assert main(["verify", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["plan"]["tp"] == 2 and all(x["sequence_parallel"] for x in found["plan"]["layers"])
    assert len(found["loss"]) == len(found["reference_loss"]) == 2
    assert max(found["max_loss_rel_diff"], found["max_weight_rel_diff"]) < 1e-4


@pytest.mark.distributed
def test_a_hang_is_ended_with_stacks_and_the_pool_starts_again(tmp_path: Path) -> None:
    item = _prepare(Case("llama", tp=2, steps=1, config=TINY))
    assert item.plan is not None
    plan = tmp_path / "plan.json"
    item.plan.save(plan)
    settings: dict[str, Any] = {"zero_stage": 0, "precision": "fp32"}
    with Pool(use_gpus=False) as pool:
        with pytest.raises(CaseFailed, match="rank 0, rank 1.* did not answer") as caught:
            run_trial(pool, item.job, str(plan), disturb="hang", limit_s=20.0, **settings)
        assert "--- rank 1" in caught.value.details and "planned.py" in caught.value.details
        found = run_trial(pool, item.job, str(plan), disturb="", limit_s=LIMIT_S, **settings)
        assert found.max_loss_rel_diff < 1e-5

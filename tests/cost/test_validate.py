"""`validate` on a sample of published runs (each names its source), and on bad ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.cost.rows import read_row, zero_stage_of
from ds_autoplan.errors import BadInputError
from ds_autoplan.runs import load_runs
from ds_autoplan.validate import kendall_tau, price_run, ranking, validate

SAMPLE = Path(__file__).with_name("published_sample.jsonl")


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    return load_runs(SAMPLE)


def test_a_sample_of_every_family_is_predicted_well(runs: list[dict[str, Any]]) -> None:
    result = validate(runs)
    summary = result["summary"]
    assert summary["supported"] == summary["rows"] == len(runs) == 30
    assert summary["time"]["mape"] <= 0.08
    assert max(abs(row["time_error"]) for row in result["rows"]) <= 0.30
    assert summary["memory"]["n"] >= 7 and summary["memory"]["mape"] <= 0.08
    assert summary["memory"]["worst_under"] >= -0.08


def test_rows_carry_the_keys_that_scripts_read(runs: list[dict[str, Any]]) -> None:
    result = validate(runs[:2])
    for key in (
        "id supported reason measured_step_s predicted_step_s time_error measured_peak_gb "
        "predicted_peak_gb memory_error"
    ).split():
        assert key in result["rows"][0]
    assert set(result["summary"]["time"]) == {"n", "mape", "median_ape", "p90_ape", "bias"}
    assert {"groups", "mean_regret", "max_regret", "kendall_tau"} <= set(
        result["summary"]["ranking"]
    )
    json.dumps(result)


def test_a_range_holds_most_measurements(runs: list[dict[str, Any]]) -> None:
    held = 0
    for row in map(price_run, runs):
        low, high = row["range_s"]
        held += low <= row["measured_step_s"] <= high
    assert held >= 0.8 * len(runs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "INT4"}, "INT4"),
        ({"model": {"encoder_layers": 24}}, "Encoder-decoder"),
        ({"hardware": {"gpu": "TPUv5"}}, "TPUv5"),
        ({"parallel": {"pp": 4096}}, "are not the row's"),
        ({"model": {"layers": 1}, "parallel": {"pp": 2, "dp": None}}, "cannot be cut"),
        ({"batch": None}, "lacks or misstates"),
    ],
)
def test_what_cannot_be_priced_says_why(
    runs: list[dict[str, Any]], change: dict[str, Any], reason: str
) -> None:
    run = copy.deepcopy(runs[0])
    for key, value in change.items():
        run[key] = {**run[key], **value} if isinstance(value, dict) else value
    row = price_run(run)
    assert not row["supported"] and reason in row["reason"]
    assert row["predicted_step_s"] is None


def test_regret_of_choosing_a_run_that_went_out_of_memory_is_one() -> None:
    def row(name: str, predicted: float) -> dict[str, Any]:
        return {
            "id": name,
            "supported": True,
            "predicted_step_s": predicted,
            "measured_step_s": None,
            "predicted_peak_gb": 1.0,
            "fits": True,
        }

    group = {
        "rows_fastest_first": [
            {"id": "a", "iteration_s": 1.0},
            {"id": "b", "iteration_s": 2.0},
            {"id": "c", "iteration_s": None, "oom": True},
        ]
    }
    rows = {name: row(name, seconds) for name, seconds in (("a", 3.0), ("b", 2.0), ("c", 4.0))}
    assert ranking([group], rows)["mean_regret"] == pytest.approx(1.0)  # b: 2.0 / 1.0 - 1
    rows["c"]["predicted_step_s"] = 1.0
    assert ranking([group], rows)["mean_regret"] == 1.0
    rows["c"]["fits"] = False
    rows["a"]["predicted_step_s"] = 1.5
    assert ranking([group], rows)["mean_regret"] == 0.0


def test_kendall_tau_counts_pairs() -> None:
    assert kendall_tau([1, 2, 3], [1, 2, 3]) == 1.0
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1.0
    assert kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def test_a_broken_file_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    with pytest.raises(BadInputError, match="does not exist"):
        load_runs(path)
    path.write_text('{"id": 1}\nnonsense\n')
    with pytest.raises(BadInputError, match="Line 2"):
        load_runs(path)


@pytest.mark.parametrize(
    ("stated", "stage"),
    [(None, None), (2, 2), ("ZeRO-3", 3), ("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("none", 0)],
)
def test_zero_stages_are_read_by_any_of_their_names(stated: object, stage: int | None) -> None:
    assert zero_stage_of(stated) == stage


def test_engines_are_told_apart_by_what_a_run_says(runs: list[dict[str, Any]]) -> None:
    names = {run["id"]: read_row(run).framework.name for run in runs}
    assert names["sc21-table1-18b"] == "megatron-2021"
    assert names["foundry-a100-sxm-80gb-7b-s2048-8g-mbs6-amp_bf16"] == "fsdp"
    assert names["bridge-26.06-gb200-qwen3-30b-a3b-mxfp8-8g-gbs512"] == "nemo-graphs"
    unknown = copy.deepcopy(runs[0])
    unknown.update(source="somewhere", id="x", notes="")
    assert read_row(unknown).framework.name == "megatron"
    unknown["parallel"]["zero_stage"] = 3
    assert read_row(unknown).framework.name == "fsdp"


def test_a_run_may_leave_out_what_can_be_inferred(runs: list[dict[str, Any]]) -> None:
    run = next(run for run in runs if run["id"].startswith("dgxc-v25.04-llama3-8b-h100-bf16"))
    sparse = copy.deepcopy(run)
    for key in ("gpus_per_node", "nodes"):
        sparse["hardware"].pop(key)
    sparse["parallel"].pop("dp")
    sparse["batch"]["micro"] = None
    assert price_run(sparse)["predicted_step_s"] == price_run(run)["predicted_step_s"]
    sparse["measured"], sparse["derived"] = {"tokens_per_s_per_gpu": 10000.0}, {}
    tokens = run["batch"]["global"] * run["model"]["seq"] / run["hardware"]["n_gpus"]
    assert price_run(sparse)["measured_step_s"] == pytest.approx(tokens / 10000.0)


def test_a_run_that_could_not_have_fitted_must_have_recomputed(runs: list[dict[str, Any]]) -> None:
    run = next(run for run in runs if run["id"].startswith("dgxc-v25.02-llama3-70b-h100-bf16"))
    assert read_row(run).stages[0].strategies[0].activation_checkpointing == "none"
    longer = copy.deepcopy(run)
    longer["model"]["seq"] *= 4
    assert read_row(longer).stages[0].strategies[0].activation_checkpointing == "full"
    longer["parallel"]["recompute"] = "none"
    assert read_row(longer).stages[0].strategies[0].activation_checkpointing == "none"

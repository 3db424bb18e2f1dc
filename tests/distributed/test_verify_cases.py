"""Cases of `verify` without processes: parsing, small models, exit status of bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from ds_autoplan.integrations.verification.small import small_config

from ds_autoplan.cli import main
from ds_autoplan.errors import BadInputError, UnsupportedError
from ds_autoplan.model.load import load_graph, read_config
from ds_autoplan.verify import Case, Result, parse_case, read_grid, verify
from tests.distributed.grids import VARIANTS, _all, full_grid, pairs, small_grid


def test_the_nearest_key_is_named() -> None:
    with pytest.raises(BadInputError, match="line 3.*'zero_stge'.*Did you mean 'zero_stage'"):
        parse_case({"model": "llama", "zero_stge": 1}, "line 3")


@pytest.mark.parametrize(
    "key, value",
    [("tp", 0), ("tp", True), ("zero_stage", 4), ("sequence_parallel", 1), ("steps", "5")],
)
def test_values_that_no_plan_has_are_refused(key: str, value: object) -> None:
    with pytest.raises(BadInputError, match=f"{key} is {value!r}"):
        parse_case({"model": "llama", key: value}, "case")


def test_a_grid_names_the_line_that_cannot_be_read(tmp_path: Path) -> None:
    grid = tmp_path / "grid.jsonl"
    grid.write_text('{"model": "llama"}\n\n{"model": "llama", "tp": 2\n')
    with pytest.raises(BadInputError, match="line 3"):
        read_grid(str(grid))
    grid.write_text("\n")
    with pytest.raises(BadInputError, match="holds no case"):
        read_grid(str(grid))


@pytest.mark.parametrize("words", [[], ["--model", "llama", "--grid", "x.jsonl"], ["--tp", "0"]])
def test_bad_input_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_unknown_model_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", "llama-2-8b"]) == 2
    assert "llama-2-7b" in capsys.readouterr().err


def test_what_has_no_plan_is_a_failed_case_without_any_process() -> None:
    """ZeRO 2 under a pipeline, and an encoder: both said so before anything starts."""
    results = verify([Case("llama", pp=2, zero_stage=2), Case("t5-large")])
    assert [result.ok for result in results] == [False, False]
    assert "ZeRO" in results[0].error or "zero_stage" in results[0].error
    assert "decoder-only" in results[1].error


@pytest.mark.parametrize(
    "model", ["llama-3-70b", "falcon-7b", "falcon-40b", "gemma-7b", "qwen3-4b"]
)
@pytest.mark.parametrize("tp, pp", [(2, 2), (4, 1), (1, 4)])
def test_a_small_model_divides_as_the_large_one(model: str, tp: int, pp: int) -> None:
    large = load_graph(model)
    config, name = read_config(model)
    small = load_graph(small_config(config, name, tp, pp, {}))
    assert small.num_parameters < 300_000 < large.num_parameters
    assert small.vocab_size % 2 == 1
    assert (small.num_layers % pp == 0) == (large.num_layers % pp == 0)
    few, many = small.classes[0].attention, large.classes[0].attention
    assert few is not None and many is not None
    for count in ("num_heads", "num_kv_heads"):
        assert (getattr(few, count) % tp == 0) == (getattr(many, count) % tp == 0)
    assert (few.num_kv_heads < tp) == (many.num_kv_heads < tp)
    widths = [
        g.classes[0].attention.num_heads * g.classes[0].attention.head_dim for g in (small, large)
    ]
    assert (widths[0] == small.hidden_size) == (widths[1] == large.hidden_size)


def test_small_models_keep_every_kind_of_layer() -> None:
    config, name = read_config("gemma-2-9b")
    small = load_graph(small_config(config, name, 1, 1, {}))
    assert len(set(small.layers)) == len(set(load_graph("gemma-2-9b").layers)) == 2


def test_a_model_with_other_attention_is_refused() -> None:
    config, name = read_config("deepseek-v3")
    with pytest.raises(UnsupportedError, match="deepseek_v3"):
        small_config(config, name, 1, 1, {})


def test_a_result_is_ok_only_where_all_three_agree() -> None:
    case = Case("llama")
    good = {"max_loss_rel_diff": 1e-7, "max_grad_norm_rel_diff": 1e-6, "max_weight_rel_diff": 1e-5}
    assert Result(case, {}, **good).ok
    for key in good:
        for bad in (1e-2, math.nan, None):
            assert not Result(case, {}, **{**good, key: bad}).ok
    assert not Result(case, {}, **good, error="raised").ok


def test_the_small_grid_holds_every_pair_of_choices() -> None:
    names = {case["name"] for case in small_grid()}
    everything = _all(tuple(VARIANTS))
    wanted = set().union(*(pairs(choice) for choice, _ in everything))
    found = set().union(*(pairs(choice) for choice, case in everything if case["name"] in names))
    assert found == wanted
    assert len(names) < 100


def test_the_grids_are_readable_cases(tmp_path: Path) -> None:
    grid = tmp_path / "grid.jsonl"
    cases = [*small_grid(), *full_grid()]
    grid.write_text("\n".join(json.dumps(case) for case in cases))
    assert len(read_grid(str(grid))) == len(cases)

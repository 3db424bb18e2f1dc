"""How a published run is read where its source leaves things open."""

from __future__ import annotations

import copy
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.api import plan as make_plan
from ds_autoplan.cost.rows import peak_kind_of, precision_of, read_row, stages_of
from ds_autoplan.runs import load_runs, run_of
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.strategy import Strategy
from ds_autoplan.validate import price_run, validate
from ds_autoplan.workload import Workload

RUN = load_runs(Path(__file__).with_name("published_sample.jsonl"))[0]
TITAN = load_runs(Path(__file__).with_name("torchtitan_runs.jsonl"))[0]


def counts(layers: int, pp: int, ends: tuple[float, float]) -> list[int]:
    return [len(stage.layers) for stage in stages_of(layers, pp, Strategy(), ends)]


def test_stages_where_the_ends_count_as_layers() -> None:
    # (70 + 2) / 12 = 6 a stage, one of which is the embedding or the head.
    assert counts(70, 12, (1.0, 1.0)) == [5, *[6] * 10, 5]
    assert counts(4, 4, (0.0, 9.0)) == [1, 1, 1, 1]


@pytest.mark.parametrize(("layers", "pp"), [(28, 2), (32, 2), (32, 4), (80, 8), (33, 4)])
@pytest.mark.parametrize("head", [0.3, 2.2, 3.55])
def test_stages_cut_by_gemm_size(layers: int, pp: int, head: float) -> None:
    """nanotron's rule: a block goes on to the next stage once the sum passes the stage's share."""
    sums = list(accumulate([1.0] * layers + [head]))
    rank, ranks = 0, []
    for total in sums[:-1]:
        while total > (rank + 1) * sums[-1] / pp + 1e-9:
            rank += 1
        ranks.append(rank)
    assert counts(layers, pp, (0.0, head)) == [ranks.count(stage) for stage in range(pp)]


@pytest.mark.parametrize(
    ("gated", "notes", "params_b", "tied"),
    [
        (True, "", None, False),
        (False, "", None, True),
        (True, "tied embeddings", None, True),
        (False, "untied embeddings", None, False),
        # 28 layers of 113.2M, and one or two tables of 131072 x 3072.
        (True, "", 3.57, True),
        (True, "", 3.98, False),
        (True, "untied embeddings", 3.57, False),
        # A count that fits neither tells nothing.
        (True, "", 9.9, False),
    ],
)
def test_tied_embeddings_are_stated_or_counted(
    gated: bool, notes: str, params_b: float | None, tied: bool
) -> None:
    run = copy.deepcopy(RUN)
    run["notes"] = notes
    run["parallel"] = {**run["parallel"], "tp": 1, "pp": 1, "dp": None}
    run["model"] = {
        **{key: None for key in run["model"]},
        **{"name": "x", "layers": 28, "hidden": 3072, "ffn": 8192, "heads": 32, "kv_heads": 32},
        **{"vocab": 131072, "seq": 4096, "gated_mlp": gated, "params_b": params_b},
    }
    assert read_row(run).graph.tied is tied


@pytest.mark.parametrize(
    ("kind", "unit", "flags", "expected"),
    [
        ("max reserved/allocated not stated", "GB", [], "reserved"),
        ("max_memory_allocated", "GiB", ["last_rank_memory"], "allocated:last"),
        ("max of first/last nodes", "GB as reported (nvidia-smi style)", [], "device"),
        ("not stated", "GB", [], "device"),
        ("torch max reserved", "GB", [], "reserved"),
    ],
)
def test_what_a_peak_counts(kind: str, unit: str, flags: list[str], expected: str) -> None:
    measured: dict[str, Any] = {"peak_mem_kind": kind, "peak_mem_unit": unit}
    assert peak_kind_of({"measured": measured, "flags": flags}) == expected


TITAN = load_runs(Path(__file__).with_name("torchtitan_runs.jsonl"))[0]


@pytest.mark.parametrize(
    ("notes", "engine"),
    [
        ("FSDP2", "torchtitan"),
        ("FSDP2 + torch.compile", "torchtitan-compiled"),
        ("FSDP2 without torch.compile", "torchtitan"),
        ("FSDP2 + torch.compile, 2025-06", "torchtitan-2025"),
    ],
)
def test_what_a_run_says_of_its_engine(notes: str, engine: str) -> None:
    run = {**TITAN, "source": "pytorch/torchtitan", "notes": notes}
    assert read_row(run).framework.name == engine


@pytest.mark.parametrize(
    ("recompute", "kinds"),
    [
        ("selective (op)", {"selective"}),
        ("selective layer", {"full", "none"}),
        ("selective: layernorm", {"selective"}),
        ("full", {"full"}),
    ],
)
def test_words_for_recomputation(recompute: str, kinds: set[str]) -> None:
    run = {**TITAN, "parallel": {**TITAN["parallel"], "recompute": recompute}}
    found = [strategy for stage in read_row(run).stages for strategy in stage.strategies]
    assert {strategy.activation_checkpointing for strategy in found} == kinds


def test_names_of_8_bits() -> None:
    for name in ("FP8", "float8 (tensorwise)", "BF16 + Float8 rowwise", "MXFP8"):
        assert precision_of(name) == "fp8"


WRONG = [
    *(None, "", "x", "false", [], {}, [1], {"a": 1}, True, 0, -1, 1.5, math.nan, math.inf),
    *(10**30, 10**400, 3, 7, -0.0, "8", "4", 1e308, 1e-308),
]
PLACES = [
    (part, name)
    for part in ("model", "hardware", "parallel", "batch", "measured", "derived")
    for name in RUN.get(part) or {}
]


@pytest.mark.parametrize(("part", "name"), PLACES)
def test_a_wrong_value_is_one_unpriced_row(part: str, name: str) -> None:
    """Whatever a row holds, it is priced as a finite time or says why not; others are priced."""
    rows = []
    for value in WRONG:
        run = copy.deepcopy(RUN)
        run[part][name] = value
        rows.append(run)
    answer = validate([*rows, RUN])
    for value, row in zip([*WRONG, "as it was"], answer["rows"], strict=True):
        if row["supported"]:
            assert math.isfinite(row["predicted_step_s"]) and row["predicted_step_s"] > 0, value
            error = row["time_error"]
            assert error is None or (math.isfinite(error) and error >= -1), value
        else:
            assert row["reason"], value
    assert answer["rows"][-1]["supported"]


@pytest.mark.parametrize(
    "part", ["model", "hardware", "parallel", "batch", "measured", "plan", "id"]
)
@pytest.mark.parametrize("value", [None, [], {}, "text", 3, math.nan])
def test_a_wrong_part_is_one_unpriced_row(part: str, value: object) -> None:
    row = price_run({**RUN, part: value})
    assert row["supported"] or row["reason"]


@pytest.mark.parametrize(
    ("part", "values", "words"),
    [
        ("parallel", {"tp": -2}, "tp is -2"),
        ("parallel", {"tp": 1.5}, "tp is 1.5"),
        ("parallel", {"dp": 3}, "are not the row's"),
        ("parallel", {"sp": "false"}, "sp is 'false'"),
        ("parallel", {"zero_stage": 7}, "zero_stage"),
        ("model", {"layers": 0}, "layers is 0"),
        ("model", {"layers": 10**9}, "at most 100,000"),
        ("model", {"hidden": math.nan}, "hidden is nan"),
        ("batch", {"global": 4, "micro": 8}, "larger than the global batch"),
        ("measured", {"iteration_s": -1.0}, "iteration_s is -1"),
        ("measured", {"iteration_s": math.nan}, "iteration_s is nan"),
    ],
)
def test_what_cannot_be_is_named(part: str, values: dict[str, Any], words: str) -> None:
    run = copy.deepcopy(RUN)
    run[part] = {**(run.get(part) or {}), **values}
    row = price_run(run)
    assert not row["supported"] and words in row["reason"]


@pytest.mark.parametrize("micro", [1, 2, 3, 6, 7, 8])
def test_torchtitan_cuts_a_batch_into_equal_micro_batches(micro: int) -> None:
    run = copy.deepcopy(TITAN)
    world = run["hardware"]["n_gpus"]
    run["parallel"] |= {"tp": 1, "pp": 4, "dp": world // 4, "cp": 1, "vpp": 1}
    run["batch"] = {"global": micro * (world // 4), "micro": micro}
    degrees = read_row(run).degrees
    assert degrees.micro_batch_size * degrees.num_micro_batches == micro


def test_a_row_that_breaks_while_it_is_priced_does_not_hide_the_others() -> None:
    """A run of this plugin holds its cluster; this one was edited to have no memory bandwidth."""
    plan = make_plan("gpt2", "1x4xA100-SXM-80GB", Workload(512, 16), PlanOptions())
    run = run_of(plan, 1.0, 2**30, "2026-11-30")
    run["plan"]["plan"]["report"]["inputs"]["topology"]["device"]["memory_bytes_per_s"] = 0.0
    first, second = validate([run, RUN])["rows"]
    assert not first["supported"] and "ZeroDivisionError" in first["reason"]
    assert second["supported"]

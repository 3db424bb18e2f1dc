"""Runs that the plugin measured: the line it writes is what `validate` prices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import ds_autoplan
from ds_autoplan.errors import BadInputError
from ds_autoplan.plan import Plan
from ds_autoplan.runs import append_run, check_writable, load_runs, run_of
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.validate import validate
from ds_autoplan.workload import Workload

WHEN = "2026-01-02T03:04:05+00:00"


def uneven_plan() -> Plan:
    """A plan whose stages and strategies differ: the head weighs on the last stage."""
    options = PlanOptions(pins={"pp": 4, "tp": 1, "zero_stage": 1})
    workload = Workload(2048, 64)
    made: Plan = ds_autoplan.plan("gemma-2b", "1x8xA100-SXM-80GB", workload, options)
    sizes = {end - first for first, end in made.stage_bounds}
    assert len(sizes) > 1
    return made


def test_a_written_run_is_priced_as_the_plan_that_ran(tmp_path: Path) -> None:
    made = uneven_plan()
    file = tmp_path / "new" / "runs.jsonl"
    check_writable(file)
    append_run(file, run_of(made, 2 * made.step_s, 2**30, WHEN))
    append_run(file, run_of(made, 0.0, 2**31, WHEN))
    answer = validate(load_runs(file))
    first, second = answer["rows"]
    assert first["supported"] and second["supported"]
    assert first["predicted_step_s"] == pytest.approx(made.step_s, rel=1e-12)
    assert first["time_error"] == pytest.approx(-0.5)
    assert second["measured_step_s"] is None and second["time_error"] is None
    assert second["measured_peak_gb"] == 2
    largest = max(stage.peak_bytes for stage in made.stages) / 2**30
    assert 0 < second["predicted_peak_gb"] < largest  # without context and allocator waste
    assert answer["summary"]["time"]["n"] == 1


def test_runs_of_one_job_under_two_plans_are_ranked(tmp_path: Path) -> None:
    workload = Workload(2048, 64)
    runs = []
    for tp, step_s in ((1, 1.0), (8, 3.0)):
        made = ds_autoplan.plan(
            "gemma-2b", "1x8xA100-SXM-80GB", workload, PlanOptions(pins={"tp": tp, "pp": 1})
        )
        runs.append(run_of(made, step_s, 2**30, WHEN))
    ranking = validate(runs)["summary"]["ranking"]
    assert ranking["groups"] == 1
    assert ranking["mean_regret"] == 0
    assert ranking["kendall_tau"] == 1


def test_a_run_has_the_keys_of_published_ones() -> None:
    sample = load_runs(Path(__file__).with_name("published_sample.jsonl"))[0]
    run = run_of(uneven_plan(), 1.0, 2**30, WHEN)
    for part in ("model", "hardware", "parallel", "batch"):
        assert set(sample[part]) & set(run[part]), part
    assert run["model"]["layers"] == 18
    assert run["parallel"]["pp"] == 4
    assert run["hardware"]["n_gpus"] == 8
    json.dumps(run)


def test_what_cannot_be_written_or_priced_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be added to .*Is a directory"):
        check_writable(tmp_path)
    made = uneven_plan()
    with pytest.raises(BadInputError, match="does not say what it was made from"):
        run_of(replace(made, report={}), 1.0, 1, WHEN)
    run = run_of(made, 1.0, 1, WHEN)
    del run["plan"]["plan"]["degrees" if "degrees" in run["plan"]["plan"] else "tp"]
    row = validate([run])["rows"][0]
    assert not row["supported"]
    assert "cannot be read" in row["reason"]

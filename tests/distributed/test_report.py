"""`"report"`: the run that was measured, as a line that `ds-autoplan validate` prices."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_autoplan.runs import load_runs
from ds_autoplan.validate import validate
from tests.distributed.pool import Pool
from tests.distributed.test_scripts import SCRIPTS, config_for

pytestmark = pytest.mark.distributed

STEPS = 15  # three to warm up, ten measured, and one on either side


def test_a_run_adds_its_measurement(pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "made here" / "runs.jsonl"
    pins = {"tp": 2, "pp": 2, "seq_length": 12, "report": str(file)}
    for _ in range(2):
        pool.run(f"{SCRIPTS}:client_optimizer", {**config_for(1), "autoplan": pins}, steps=STEPS)
    runs = load_runs(file)
    assert len(runs) == 2
    assert runs[0]["parallel"]["tp"] == runs[0]["parallel"]["pp"] == 2
    assert runs[0]["hardware"]["gpu"] == "CPU"
    answer = validate(runs)
    for row in answer["rows"]:
        assert row["supported"], row["reason"]
        assert row["measured_step_s"] > 0 and row["predicted_step_s"] > 0
        assert row["measured_peak_gb"] > 0
    assert answer["summary"]["time"]["n"] == answer["summary"]["memory"]["n"] == 2

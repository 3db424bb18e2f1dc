"""`doctor`: every check is provoked into each of its answers, where a test can do that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds_autoplan import doctor
from ds_autoplan.cli import main
from ds_autoplan.doctor import OK, PROBLEM, WARNING, Finding
from ds_autoplan.errors import AutoplanError


def only(findings: Iterator[Finding]) -> Finding:
    found = list(findings)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("version", "status"), [((3, 9), WARNING), ((3, 10), OK), ((3, 13), OK), ((3, 14), WARNING)]
)
def test_python(version: tuple[int, int], status: str) -> None:
    assert only(doctor.python_version(version)).status == status


def test_packages_are_compared_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"pulp": "2.9", "pydantic": "2.7.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise doctor.metadata.PackageNotFoundError(name)
        return installed[name]

    needed = ["pulp<4,>=3.3", "pydantic<3,>=2.7", "torch>=2.13", 'ruff; extra == "lint"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: needed)
    monkeypatch.setattr(doctor.metadata, "version", version)
    found = {item.check: item for item in doctor.packages()}
    assert {name: item.status for name, item in found.items()} == {
        "pulp": PROBLEM,
        "pydantic": OK,
        "torch": PROBLEM,
    }
    assert "needed is <4,>=3.3" in found["pulp"].detail
    assert 'pip install "torch>=2.13"' in found["torch"].remedy


def test_a_hook_that_is_off_is_said() -> None:
    found = only(doctor.hook({**os.environ, "DS_AUTOPLAN": "0"}))
    assert found.status == WARNING and "Unset DS_AUTOPLAN" in found.remedy


def test_a_hook_that_is_not_read_is_a_problem() -> None:
    # Without site-packages no .pth file is read.
    bare = {**os.environ, "PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    found = only(doctor.hook({**bare, "PYTHONHOME": "", "DS_AUTOPLAN": "1"}))
    assert found.status in (OK, PROBLEM)  # as this environment is installed
    assert (found.status == OK) == (not found.remedy)


def test_the_solver_answers() -> None:
    assert only(doctor.solver()).status == OK


def test_a_stale_lock_is_found_and_a_fresh_one_is_not_blamed(tmp_path: Path) -> None:
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    assert next(doctor.extensions(tmp_path)).status == OK
    lock.touch()
    made = lock.stat().st_mtime
    assert next(doctor.extensions(tmp_path, made + 60)).status == WARNING
    found = next(doctor.extensions(tmp_path, made + 3600))
    assert found.status == PROBLEM and str(lock) in found.detail
    assert "hangs in init_distributed" in found.remedy
    assert lock.exists(), "doctor changes nothing"


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ('{"autoplan": true} // a comment', OK, "asks for a plan"),
        ('{"train_batch_size": 8}', WARNING, "does not ask"),
        ('{"autoplan": {"tpp": 2}}', PROBLEM, "Did you mean 'tp'?"),
        ("[1, 2]", PROBLEM, "not an object"),
    ],
)
def test_a_config(text: str, status: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    found = only(doctor.config(str(path)))
    assert found.status == status and said in found.detail


def test_a_missing_config_is_a_problem(tmp_path: Path) -> None:
    assert only(doctor.config(str(tmp_path / "no.json"))).status == PROBLEM


def test_processes_that_cannot_meet_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_autoplan.integrations.calibration import local

    def fail(processes: int, limit_s: float) -> None:
        raise AutoplanError("they did not meet")

    assert only(doctor.pair_of_processes()).status == OK
    monkeypatch.setattr(local, "exchange", fail)
    found = only(doctor.pair_of_processes())
    assert found.status == PROBLEM and "GLOO_SOCKET_IFNAME" in found.remedy


def test_a_check_that_breaks_is_a_finding_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Finding]:
        raise RuntimeError("no such thing")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.python_version))
    assert main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert [item["check"] for item in answer["findings"]] == ["broken", "python"]
    monkeypatch.setattr(doctor, "CHECKS", (doctor.python_version, doctor.solver))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr()
    assert "HiGHS through PuLP" in shown.out and "No problem found" in shown.err


def test_a_pinned_plan_is_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"autoplan": {"plan": "no-such-plan.json"}}')
    found = only(doctor.config(str(path)))
    assert found.status == PROBLEM and "no-such-plan.json" in found.detail

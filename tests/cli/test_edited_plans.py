"""Plan files that were edited: one readable message, never a traceback, nothing lost."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.api import plan as make_plan
from ds_autoplan.cli import main
from ds_autoplan.errors import BadInputError
from ds_autoplan.plan import Plan
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.workload import Workload

PLAN = make_plan(
    "gpt2", "1x4xA100-SXM-80GB", Workload(512, 16), PlanOptions(pins={"pp": [2], "dp": [2]})
)
WRONG = [None, "x", [1], 10**400]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key of nested objects; of lists the first element only."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list) and value:
        items = ((0, value[0]),)
    for key, inner in items:
        if path[-1:] != ("config",):
            found += places(inner, (*path, key))
    return found


def edited(path: tuple[Any, ...], value: object) -> dict[str, Any]:
    data = copy.deepcopy(json.loads(json.dumps(PLAN.to_json())))
    at: Any = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


@pytest.mark.parametrize("path", places(PLAN.to_json()), ids=lambda path: ".".join(map(str, path)))
def test_no_edit_is_a_traceback(path: tuple[Any, ...], tmp_path: Path) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "page.html"
    for value in WRONG:
        file.write_text(json.dumps(edited(path, value)))
        commands = [
            ["explain", str(file)],
            ["report", str(file), "--out", str(page)],
            ["export", str(file), "--to", "deepspeed"],
            ["export", str(file), "--to", "megatron"],
        ]
        for command in commands:
            assert main(command) in (0, 1, 2), (command, value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (replace(PLAN, layers=()), "lists 0 layers"),
        (replace(PLAN, layers=PLAN.layers[::-1]), "once, in order"),
        (replace(PLAN, layers=PLAN.layers[:-1]), "stages hold"),
        (replace(PLAN, stages=PLAN.stages[:1]), "stages hold"),
        (PLAN.with_degrees(dp=-2), "dp is -2"),
        (PLAN.with_degrees(dp=4), "global_batch_size is 16"),
        (PLAN.with_degrees(zero_stage=9), "zero_stage is 9"),
        (PLAN.with_degrees(order="tp-dp"), "each axis"),
        (replace(PLAN, backend="jax"), "backend is 'jax'"),
        (replace(PLAN, precision="int4"), "precision is 'int4'"),
        (replace(PLAN, vocabulary="some"), "vocabulary is 'some'"),
    ],
)
def test_a_plan_that_does_not_agree_with_itself_is_refused(plan: Plan, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        Plan.from_json(json.loads(json.dumps(plan.to_json())))


def test_the_page_does_not_replace_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    PLAN.save(file)
    before = file.read_bytes()
    assert main(["report", str(file), "--out", str(tmp_path / "." / "plan.json")]) == 2
    assert "which is read" in capsys.readouterr().err and file.read_bytes() == before


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    file, page = tmp_path / "plan.json", tmp_path / "page.html"
    page.write_text("kept")
    replace(PLAN, model="\udc80").save(file)
    assert main(["report", str(file), "--out", str(page)]) == 2
    assert page.read_text() == "kept" and {item.name for item in tmp_path.iterdir()} == {
        "plan.json",
        "page.html",
    }
    assert main(["explain", "x" * 5000]) == 2


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    file, link = tmp_path / "plan.json", tmp_path / "latest.json"
    link.symlink_to(file)
    PLAN.save(link)
    assert link.is_symlink() and Plan.load(file).fingerprint == PLAN.fingerprint

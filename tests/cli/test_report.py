"""The HTML report: whole, well-formed, self-contained, and it says what the plan says."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ds_autoplan.api import plan as make_plan
from ds_autoplan.cli import main
from ds_autoplan.cli.table import seconds
from ds_autoplan.plan import Plan
from ds_autoplan.report import render
from ds_autoplan.workload import Workload

SAMPLE = Path(__file__).parents[1] / "cost" / "published_sample.jsonl"


class Page(HTMLParser):
    """Text, tags that load something, and a check that tags close in order."""

    EMPTY = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [str(found[key]) for key in ("src", "href") if key in found]
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        self.ids += [str(found["id"])] if "id" in found else []
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def plan() -> Plan:
    workload = Workload(seq_length=4096, global_batch_size=256)
    return make_plan("llama-2-13b", "2x8xA100-SXM-80GB", workload)


def test_the_page_says_what_the_plan_says(plan: Plan) -> None:
    page = Page(render(plan))
    assert not page.loads, "the page loads nothing"
    for stage in plan.stages:
        assert f"{stage.peak_bytes / 1e9:.1f}" in page.words
        assert f"{stage.first_layer} to {stage.last_layer}" in page.words
    for other in plan.alternatives:
        assert other["why"] in page.words and seconds(other["step_s"]) in page.words
    for name, value in plan.breakdown_s.items():
        assert (f"{name} {seconds(value)}" in page.words) == (value > 0)
    for item in plan.excluded:
        assert item["reason"].partition(": ")[0] in page.words
    for note in plan.assumptions:
        assert note in page.words
    assert plan.fingerprint in page.words and seconds(plan.step_s) in page.words
    assert {"step", "stages", "layers", "runners-up", "proof", "exclusions", "cluster"} <= set(
        page.ids
    )
    assert "measured" not in page.ids


def test_names_are_text_not_markup(plan: Plan) -> None:
    odd = replace(plan, model='<script>alert("x")</script>')
    assert Page(render(odd)).loads == []


def test_bars_are_no_longer_than_a_device(plan: Plan) -> None:
    from ds_autoplan.report.page import context

    for stage in context(plan, [])["stages"]:
        assert 0 < sum(item["share"] for item in stage["items"]) <= 100.0 + 1e-6
    assert sum(part["share"] for part in context(plan, [])["step"]) == pytest.approx(100.0)


def test_the_command(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.save(tmp_path / "plan.json")
    out = tmp_path / "report.html"
    command = ["report", str(tmp_path / "plan.json"), "--out", str(out)]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "out": str(out),
        "bytes": out.stat().st_size,
        "fingerprint": plan.fingerprint,
    }
    assert main([*command, "--runs", str(SAMPLE)]) == 0
    page = Page(out.read_text())
    assert "measured" in page.ids and "sc21-table1-18b" in page.words
    capsys.readouterr()
    assert main([*command[:2], "--out", str(tmp_path / "missing" / "r.html")]) == 2
    assert "cannot be written: No such file" in capsys.readouterr().err

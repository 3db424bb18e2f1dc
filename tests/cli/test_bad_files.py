"""Files and descriptions that nobody should give, and that people do: one message, status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.cli import main

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 101,
}
LEVEL = {"name": "node", "size": 8, "gb_per_s": 200, "latency_us": 3}
DEVICE = {
    "name": "X",
    "architecture": "hopper",
    "multiprocessors": 100,
    "memory_gib": 80,
    "memory_tb_s": 2,
    "peak_tflops": {"bf16": 500},
}


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that must refuse its input."""
    assert main(list(words)) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("ds-autoplan: ")
    assert captured.err.count("\n") == 1
    return captured.err


def job(folder: Path, model: dict[str, Any] | None = None, cluster: str = "1x4xH100") -> list[str]:
    (folder / "model.json").write_text(json.dumps(model or MODEL))
    words = ["plan", "--model", str(folder / "model.json"), "--cluster", cluster]
    return [*words, "--seq-length", "64", "--global-batch-size", "16"]


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        ("2x8xH100,nic=0Gb", "more than 0"),
        ("2x8xH100,nic=..Gb", "'..Gb'"),
        ("2x8xH100,nics=0x100Gb", "NICs"),
        ("2x8xH100,nics=-4x100Gb", "'-4'"),
        ("2x8xH100,nics=nanx100Gb", "'nan'"),
        ("2x8xH100,oversubscription=0", "oversubscription"),
        ("2x8xH100,oversubscription=-3", "oversubscription"),
        ("2x8xH100,oversubscription=nan", "oversubscription"),
        ("2x8xH100,oversubscription=inf", "oversubscription"),
        ("99999999999x8xH100", "at most"),
        ("100000x100000xH100", "at most 1,000,000"),
        ("x" * 5000, "longer than any path"),
    ],
)
def test_clusters_that_cannot_be(
    cluster: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(capsys, *job(tmp_path, cluster=cluster))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"device": "H100", "nodes": 0, "gpus_per_node": 4}, "number of nodes is 0"),
        ({"device": "H100", "nodes": -1, "gpus_per_node": 4}, "number of nodes is -1"),
        ({"device": "H100", "nodes": "a", "gpus_per_node": 4}, "number of nodes is 'a'"),
        ({"device": "H100", "nodes": 2, "gpus_per_node": 8, "nic_gbit": 0}, "Gb/s"),
        ({"device": "H100", "levels": [{**LEVEL, "gb_per_s": -5}]}, "gb_per_s is -5"),
        ({"device": "H100", "levels": [{**LEVEL, "gb_per_s": "nan"}]}, "gb_per_s is 'nan'"),
        ({"device": "H100", "levels": [{**LEVEL, "latency_us": -3}]}, "latency_us is -3"),
        ({"device": "H100", "levels": [{**LEVEL, "size": 0}]}, "size is 0"),
        ({"device": "H100", "levels": [LEVEL], "gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"device": {**DEVICE, "memory_tb_s": 0}, "levels": [LEVEL]}, "memory_tb_s is 0"),
        ({"device": {**DEVICE, "multiprocessors": 0}, "levels": [LEVEL]}, "multiprocessors is 0"),
        ({"device": {**DEVICE, "peak_tflops": {"bf16": -3}}, "levels": [LEVEL]}, "is -3"),
        ({"device": {**DEVICE, "peak_tflops": [1]}, "levels": [LEVEL]}, "peak_tflops"),
    ],
)
def test_cluster_files_that_cannot_be(
    data: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(data))
    words = job(tmp_path, cluster=str(tmp_path / "cluster.json"))
    assert text in refused(capsys, *words)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 10**12}, "at most 100,000"),
        ({"hidden_size": 10**400}, "at most 1,000,000,000"),
        ({"vocab_size": 10**400}, "a huge number"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 key-value heads"),
        ({"model_type": "swin", "depths": None}, "cannot be read as a 'swin' model"),
    ],
)
def test_configs_that_cannot_be(
    changes: dict[str, Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in refused(capsys, *job(tmp_path, {**MODEL, **changes}))


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--memory-reserve-gb", "nan", "memory_reserve_gb is nan"),
        ("--time-limit", "nan", "time_limit_s is nan"),
        ("--gradient-clipping", "nan", "gradient_clipping is nan"),
        ("--gradient-clipping", "-1", "gradient_clipping is -1.0"),
        ("--global-batch-size", "1" + "0" * 30, "global_batch_size"),
    ],
)
def test_numbers_that_cannot_be(
    option: str, value: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = job(tmp_path)
    if option in words:
        at = words.index(option)
        del words[at : at + 2]
    assert text in refused(capsys, *words, option, value)


@pytest.mark.parametrize("kind", ["folder", "binary", "deep", "list"])
def test_files_of_the_wrong_kind(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00{")
    else:
        path.write_text("[" * 100_000 if kind == "deep" else "[]")
    words = job(tmp_path, cluster=str(path))
    for command in (words, ["explain", str(path)], ["diff", str(path), str(path)]):
        assert str(path) in refused(capsys, *command)
    good = tmp_path / "runs.jsonl"
    good.write_text("{}\n")
    if kind != "list":  # a list is what a groups file holds
        assert str(path) in refused(capsys, "validate", str(good), "--groups", str(path))
        assert str(path) in refused(capsys, "validate", str(path))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("plan",), []),
        (("plan",), None),
        (("plan", "step_s"), "x"),
        (("plan", "step_s"), 0),
        (("plan", "report"), None),
        (("plan", "breakdown_s"), {"x": "y"}),
        (("plan", "cluster"), 5),
        (("plan", "mfu"), None),
        (("plan", "solver", "gap"), "x"),
        (("plan", "stages", 0, "memory"), None),
        (("plan", "stages", 0, "peak_bytes"), "x"),
        (("alternatives",), [5]),
        (("excluded",), [{}]),
        (("plan", "report", "inputs", "topology", "levels"), []),
        (("plan", "report", "inputs", "config"), 5),
        (("plan", "report", "inputs", "options", "pins"), 5),
    ],
)
def test_plans_that_were_edited(
    where: tuple[Any, ...], value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main([*job(tmp_path), "--out", str(path)]) == 0
    capsys.readouterr()
    data = json.loads(path.read_text())
    at = data
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    path.write_text(json.dumps(data))
    message = refused(capsys, "explain", str(path), "--why-not", "tp=2")
    assert "plan" in message


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("--tp 1 --pp 4 --dp 1 --zero-stage 3", "ZeRO stages 0 and 1 only"),
        ("--tp 1 --pp 1 --dp 2 --cp 2 --zero-stage 1", "no context parallelism"),
        ("--tp 1 --pp 1 --dp 4 --ep 2 --zero-stage 1", "experts"),
        ("--tp 1 --pp 4 --dp 1 --vpp 2 --zero-stage 1", "interleaved"),
        ("--tp 1 --pp 1 --dp 4 --zero-stage 1 --sequence-parallel", "needs tp > 1"),
        ("--tp 2 --pp 1 --dp 2 --zero-stage 1", ""),
    ],
)
def test_an_estimate_says_what_the_planner_excludes(
    setting: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is priced all the same: "what if" is the question."""
    words = ["estimate", *job(tmp_path)[1:], *setting.split(), "--micro-batch-size", "1"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step_s"] > 0
    assert bool(answer["excluded"]) == bool(reason)
    assert reason in " ".join(answer["excluded"])
    assert main(words) == 0
    assert ("The planner excludes this" in capsys.readouterr().out) == bool(reason)

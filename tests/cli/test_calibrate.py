"""`calibrate` and `--cluster detect`: what is measured is a cluster that plans are made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ds_autoplan.integrations.calibration import local

from ds_autoplan.cli import main
from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cluster.presets import topology_from_json, topology_to_json
from ds_autoplan.config import parse_autoplan

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
JOB = ["--seq-length", "64", "--global-batch-size", "4", "--precision", "fp32", "--json"]


@pytest.mark.parametrize(
    "spec", ["4x8xH100-SXM-80GB", "2x4xMI300X", "1x8xA100-PCIe-80GB", "9x8xGB200", "1x2xCPU"]
)
def test_a_cluster_survives_its_json(spec: str) -> None:
    topology = parse_cluster(spec)
    again = topology_from_json(json.loads(json.dumps(topology_to_json(topology))))
    assert again.device.memory_bytes == topology.device.memory_bytes
    assert again.device.peak_flops == pytest.approx(topology.device.peak_flops)
    assert again.device.matmul_flops == pytest.approx(topology.device.matmul_flops)
    assert again.gpus_per_node == topology.gpus_per_node and again.name == topology.name
    for mine, its in zip(again.levels, topology.levels, strict=True):
        assert (mine.name, mine.size) == (its.name, its.size)
        for item in ("bytes_per_s", "latency_s", "all_reduce_bytes_per_s", "pair_bytes_per_s"):
            assert getattr(mine, item) == pytest.approx(getattr(its, item))


def test_two_processes_are_measured_and_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cluster.json"
    assert main(["calibrate", "--processes", "2", "--out", str(out), "--json"]) == 0
    cluster = json.loads(capsys.readouterr().out)
    assert cluster == json.loads(out.read_text())
    topology = parse_cluster(str(out))
    assert topology.calibrated and topology.num_devices == 2
    assert topology.device.architecture == "cpu"
    assert all(rate > 1e6 for rate in topology.device.matmul_flops.values())
    assert topology.levels[0].bytes_per_s > 1e5 and 0 < topology.levels[0].latency_s < 1.0
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    assert main(["plan", "--model", str(model), "--cluster", str(out), *JOB]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["cluster"]["calibrated"] and plan["uncalibrated_fraction"] == 0.0


def test_a_process_that_fails_is_one_readable_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_free_port", lambda: -1)  # no process can meet another there
    assert main(["calibrate", "--processes", "2"]) == 1
    error = capsys.readouterr().err
    assert "A process that exchanges tensors failed" in error and "Traceback" not in error


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_detect_measures_where_there_is_no_known_gpu(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[int] = []

    def measure(processes: int) -> dict[str, Any]:
        asked.append(processes)
        return topology_to_json(parse_cluster(f"1x{processes}xCPU"))

    monkeypatch.setattr(local, "local_gpus", lambda: "")
    monkeypatch.setattr(local, "local_processes", lambda: 2)
    monkeypatch.setattr(local, "measure", measure)
    model = tmp_path / "config.json"
    model.write_text(json.dumps(TINY))
    degrees = ["--tp", "2", "--pp", "1", "--dp", "1", "--micro-batch-size", "1"]
    more = [*degrees, "--zero-stage", "0"] if command == "estimate" else []
    assert main([command, "--model", str(model), "--cluster", "detect", *JOB, *more]) == 0
    assert asked == [2]
    monkeypatch.setattr(local, "local_gpus", lambda: "1x8xH100-SXM-80GB")
    more = ["--tp", "2", "--pp", "1", "--dp", "4", "--micro-batch-size", "1", "--zero-stage", "0"]
    job = ["--seq-length", "64", "--global-batch-size", "4", "--json"]
    assert main(["estimate", "--model", str(model), "--cluster", "detect", *job, *more]) == 0
    assert asked == [2]


def test_a_job_may_ask_for_a_measurement() -> None:
    config = parse_autoplan({"calibrate": True})
    assert config is not None and config.calibrate
    assert not parse_autoplan(True).calibrate  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "1"}, "MASTER_PORT is ''"),
        ({"RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "0", "MASTER_PORT": "29999"}, "MASTER_ADDR is not set"),
        ({"RANK": "5", "MASTER_PORT": "1"}, "RANK is 5 of WORLD_SIZE 2"),
        ({"RANK": "0", "LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1'"),
    ],
)
def test_half_a_launcher_is_named(
    changes: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **changes}.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "--processes", "1"]) == 2
    assert said in capsys.readouterr().err


def test_ranks_of_a_launcher_do_not_detect_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    job = ["--model", "gpt2", "--seq-length", "128", "--global-batch-size", "8"]
    assert main(["plan", "--cluster", "detect", *job]) == 2
    assert "ds-autoplan calibrate --out" in capsys.readouterr().err


def test_what_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ds_autoplan.integrations.calibration import local

    monkeypatch.setattr(local, "measure", lambda processes: pytest.fail("it was measured"))
    for path in (tmp_path / "no" / "c.json", tmp_path):
        assert main(["calibrate", "--out", str(path)]) == 2
        assert "cannot be written" in capsys.readouterr().err

"""Exports: what each tool is told, parsed by its own reader where one is installed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.api import plan as make_plan
from ds_autoplan.cli import main
from ds_autoplan.errors import BadInputError, InfeasibleError, UnsupportedError
from ds_autoplan.export import export
from ds_autoplan.plan import Plan
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.workload import Workload

CLUSTER = "2x8xH100-SXM-80GB"


def planned(backend: str = "megatron", **pins: Any) -> Plan:
    workload = Workload(seq_length=4096, global_batch_size=64, backend=backend)
    options = PlanOptions(pins={name: [value] for name, value in pins.items()})
    return make_plan("llama-2-7b", CLUSTER, workload, options)


def arguments(plan: Plan) -> dict[str, str]:
    """Megatron-LM's arguments by name."""
    lines = export(plan, "megatron", "plan.json").files["megatron.args"].splitlines()
    words = [shlex.split(line) for line in lines]
    assert all(len(word) <= 2 for word in words)
    return {word[0]: " ".join(word[1:]) for word in words}


def with_stages(plan: Plan, stages: list[int]) -> Plan:
    """The plan with layer i on stage stages[i], not interleaved."""
    layers = tuple(
        replace(layer, stage=stage) for layer, stage in zip(plan.layers, stages, strict=True)
    )
    return replace(plan, layers=layers, degrees=replace(plan.degrees, vpp=1))


def checkpointed(plan: Plan, kinds: list[str]) -> Plan:
    layers = tuple(
        replace(layer, strategy=replace(layer.strategy, activation_checkpointing=kind))
        for layer, kind in zip(plan.layers, kinds, strict=True)
    )
    return replace(plan, layers=layers)


def test_megatron_is_told_every_degree() -> None:
    plan = planned(tp=4, pp=2, cp=2, zero_stage=1, activation_checkpointing="none")
    told = arguments(plan)
    assert told["--tensor-model-parallel-size"] == "4"
    assert told["--pipeline-model-parallel-size"] == "2"
    assert told["--context-parallel-size"] == "2"
    assert told["--micro-batch-size"] == str(plan.degrees.micro_batch_size)
    assert told["--global-batch-size"] == "64" and told["--seq-length"] == "4096"
    assert {"--bf16", "--use-distributed-optimizer"} <= told.keys()
    assert ("--sequence-parallel" in told) == plan.layers[0].strategy.sequence_parallel
    assert not any(name.startswith("--recompute") for name in told)


@pytest.mark.parametrize(
    "counts", [[7, 8, 9, 8], [1, 10, 11, 10], [4, 4, 4, 4, 4, 4, 4, 4], [3, 5, 4, 4, 4, 4, 4, 4]]
)
def test_megatron_core_reads_the_stages_as_planned(counts: list[int]) -> None:
    """Four stages, cut unevenly or interleaved twice; read by Megatron-core's own parser."""
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    vpp = len(counts) // 4
    stages = [chunk % 4 for chunk, count in enumerate(counts) for _ in range(count)]
    plan = with_stages(planned(pp=4), stages)
    plan = replace(plan, degrees=replace(plan.degrees, vpp=vpp))
    told = arguments(plan)
    if len(set(counts)) == 1:
        assert told["--num-layers-per-virtual-pipeline-stage"] == "4"
        return
    read = layout.PipelineParallelLayerLayout.from_str(told["--pipeline-model-parallel-layout"], 4)
    read.validate_layer_layout(num_layers=32, mtp_num_layers=None)
    found = [
        sum(kind.name == "decoder" for kind in read.layout[chunk % 4][chunk // 4])
        for chunk in range(len(counts))
    ]
    assert found == counts


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["none"] * 32, {}),
        (["selective"] * 32, {"--recompute-granularity": "selective"}),
        (["full"] * 32, {"--recompute-method": "uniform", "--recompute-num-layers": "1"}),
        (
            (["full"] * 3 + ["none"] * 5) * 4,
            {"--recompute-method": "block", "--recompute-num-layers": "3"},
        ),
    ],
)
def test_megatron_is_told_what_to_recompute(kinds: list[str], expected: dict[str, str]) -> None:
    plan = checkpointed(with_stages(planned(pp=4), [i // 8 for i in range(32)]), kinds)
    told = arguments(plan)
    assert {name: told.get(name) for name in expected} == expected
    assert ("--recompute-granularity" in told) == (set(kinds) != {"none"})


@pytest.mark.parametrize("kinds", [["full"] + ["none"] * 31, ["selective", "full"] * 16])
def test_what_megatron_cannot_say_is_refused(kinds: list[str]) -> None:
    plan = checkpointed(with_stages(planned(pp=4), [i // 8 for i in range(32)]), kinds)
    with pytest.raises(UnsupportedError, match="same number of layers in each stage"):
        export(plan, "megatron", "plan.json")
    whole = replace(planned(tp=2), vocabulary="replicate")
    for tool in ("megatron", "torchtitan"):
        with pytest.raises(UnsupportedError, match="vocabulary whole on each of its 2"):
            export(whole, tool, "plan.json")


def test_torchtitan_reads_the_degrees_and_the_cut() -> None:
    tomllib = pytest.importorskip("tomllib")
    stages = [0] * 7 + [1] * 8 + [2] * 9 + [3] * 8
    plan = with_stages(planned(pp=4, tp=2, zero_stage=1, activation_checkpointing="full"), stages)
    found = export(plan, "torchtitan", "plan.json")
    config = tomllib.loads(found.files["torchtitan.toml"])
    parallelism = config["parallelism"]
    assert parallelism["tensor_parallel_degree"] == 2
    assert (
        parallelism["data_parallel_shard_degree"] * parallelism["data_parallel_replicate_degree"]
        == plan.degrees.dp
    )
    parts = parallelism["module_fqns_per_model_part"]
    assert parts[0][0] == "tok_embeddings" and parts[-1][-2:] == ["norm", "output"]
    assert [sum(name.startswith("layers.") for name in part) for part in parts] == [7, 8, 9, 8]
    training = config["training"]
    per_rank = plan.degrees.micro_batch_size * plan.degrees.num_micro_batches
    assert training["local_batch_size"] == per_rank
    assert per_rank * plan.degrees.dp == training["global_batch_size"] == 64
    assert config["activation_checkpoint"] == {"mode": "full"}
    assert any("no ZeRO 1" in note for note in found.notes)


def test_deepspeed_and_accelerate_pin_the_plan(tmp_path: Path) -> None:
    plan = planned("deepspeed", tp=2)
    path = tmp_path / "plan.json"
    plan.save(path)
    assert main(["export", str(path), "--to", "accelerate", "--out", str(tmp_path / "a")]) == 0
    config = json.loads((tmp_path / "a" / "ds_config.json").read_text())
    assert Plan.load(config["autoplan"]["plan"]).fingerprint == plan.fingerprint
    assert config["bf16"] == {"enabled": True}
    assert (
        config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 16
        == config["train_batch_size"]
        == 64
    )
    reader = pytest.importorskip("accelerate.commands.config.config_args")
    read = reader.load_config_from_file(str(tmp_path / "a" / "accelerate.yaml"))
    assert read.num_processes == 16 and read.num_machines == 2
    assert read.deepspeed_config["deepspeed_config_file"] == "ds_config.json"


def test_plans_of_the_megatron_backend_are_not_run_by_this_plugin() -> None:
    with pytest.raises(UnsupportedError, match="--backend deepspeed"):
        export(planned(), "deepspeed", "plan.json")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    planned(tp=2, activation_checkpointing="none").save(path)
    assert main(["export", str(path), "--to", "megatron", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["to"] == "megatron" and "megatron.args" in answer["files"]
    assert main(["export", str(path), "--to", "megatron"]) == 0
    shown = capsys.readouterr()
    assert shown.out == answer["files"]["megatron.args"] and "note: For 16 ranks" in shown.err
    folder = tmp_path / "out"
    command = ["export", str(path), "--to", "megatron", "--out", str(folder)]
    assert main(command) == 0
    assert (folder / "megatron.args").read_text() == answer["files"]["megatron.args"]
    assert main(command) == 2
    assert "No file is replaced" in capsys.readouterr().err
    assert main(["export", str(path), "--to", "nemo"]) == 2
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("empty", ["first", "last"])
def test_chunks_without_layers_are_told_too(empty: str) -> None:
    """126 layers in 128 chunks: the embedding, or the head, has one of its own."""
    layout = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    from ds_autoplan.export.layout import chunks

    counts = [1] * 7 + [0] if empty == "last" else [0] + [1] * 7
    stages = [at % 4 for at, count in enumerate(counts) for _ in range(count)]
    plan = planned(pp=4)
    plan = with_stages(replace(plan, layers=plan.layers[:7]), stages)
    plan = replace(plan, degrees=replace(plan.degrees, vpp=2))
    assert [len(chunk) for chunk in chunks(plan)] == counts
    told = arguments(plan)["--pipeline-model-parallel-layout"]
    read = layout.PipelineParallelLayerLayout.from_str(told, 4)
    read.validate_layer_layout(num_layers=7, mtp_num_layers=None)
    found = [
        sum(kind.name == "decoder" for kind in read.layout[chunk % 4][chunk // 4])
        for chunk in range(8)
    ]
    assert found == counts


def test_an_interleaved_plan_of_llama_405b_is_told_whole() -> None:
    """16 stages of 8 chunks for 126 layers: embedding and head count as a layer each."""
    workload = Workload(seq_length=8192, global_batch_size=2048, backend="megatron")
    pins = {"tp": [8], "pp": [16], "vpp": [8]}
    plan = make_plan("llama-3-405b", "128x8xH100-SXM-80GB", workload, PlanOptions(pins=pins))
    told = arguments(plan)["--pipeline-model-parallel-layout"]
    chunks = told.strip("EL").split("|")
    assert len(chunks) == 128 and "".join(chunks) == "t" * 126
    assert chunks[0] == chunks[-1] == ""


def test_stages_out_of_order_are_no_chunks() -> None:
    plan = with_stages(planned(pp=4), [3] * 8 + [0] * 8 + [1] * 8 + [2] * 8)
    with pytest.raises(BadInputError, match="out of order"):
        export(plan, "megatron", "plan.json")


def test_chosen_layers_are_checkpointed_where_all_are_alike() -> None:
    """Megatron-LM checkpoints each stage's first layers; which ones matters if layers differ."""
    kinds = (["none"] * 5 + ["full"] * 3) * 4
    plan = checkpointed(with_stages(planned(pp=4), [i // 8 for i in range(32)]), kinds)
    assert arguments(plan)["--recompute-num-layers"] == "3"
    workload = Workload(seq_length=4096, global_batch_size=64, backend="megatron")
    pins = {"pp": [1], "activation_checkpointing": ["full"]}
    mixed = make_plan("gemma-2-9b", CLUSTER, workload, PlanOptions(pins=pins))
    kinds = ["none", *["full"] * (len(mixed.layers) - 1)]
    with pytest.raises(UnsupportedError, match="the model's layers differ"):
        export(checkpointed(mixed, kinds), "megatron", "plan.json")


def test_mixtures_under_tp_have_sequence_parallelism() -> None:
    """Megatron-core's MoELayer raises without; so the planner leaves such plans out."""
    workload = Workload(seq_length=4096, global_batch_size=64, backend="megatron")
    pins = {"tp": [2], "ep": [8], "zero_stage": [1]}
    plan = make_plan("mixtral-8x7b", "4x8xH100-SXM-80GB", workload, PlanOptions(pins=pins))
    assert plan.layers[0].strategy.sequence_parallel and "--sequence-parallel" in arguments(plan)
    tomllib = pytest.importorskip("tomllib")
    text = export(plan, "torchtitan", "plan.json").files["torchtitan.toml"]
    parallelism = tomllib.loads(text)["parallelism"]
    assert parallelism["expert_tensor_parallel_degree"] == 2
    pinned = PlanOptions(pins={**pins, "sequence_parallel": [False]})
    with pytest.raises(InfeasibleError, match="with sequence parallelism only"):
        make_plan("mixtral-8x7b", "4x8xH100-SXM-80GB", workload, pinned)
    bare = tuple(
        replace(layer, strategy=replace(layer.strategy, sequence_parallel=False))
        for layer in plan.layers
    )
    with pytest.raises(UnsupportedError, match="with sequence parallelism only"):
        export(replace(plan, layers=bare), "megatron", "plan.json")
    with pytest.raises(UnsupportedError, match="ZeRO 0"):
        export(plan.with_degrees(zero_stage=0), "torchtitan", "plan.json")


def test_what_other_tools_do_not_run_is_refused() -> None:
    plan = planned(pp=4)
    mixed = replace(
        planned(tp=2, sequence_parallel=True),
        layers=tuple(
            replace(layer, strategy=replace(layer.strategy, sequence_parallel=layer.index > 3))
            for layer in plan.layers
        ),
    )
    inputs = plan.report["inputs"]
    report = {**plan.report, "inputs": {**inputs, "options": {"schedule": "gpipe"}}}
    others = [
        make_plan(name, "1x4xA100-SXM-80GB", Workload(512, 64), PlanOptions())
        for name in ("t5-large", "bert-large", "vit-huge")
    ]
    for tool in ("megatron", "torchtitan"):
        with pytest.raises(UnsupportedError, match="differ in sequence parallelism"):
            export(mixed, tool, "plan.json")
        with pytest.raises(UnsupportedError, match="schedule gpipe"):
            export(replace(plan, report=report), tool, "plan.json")
        for other in others:
            with pytest.raises(UnsupportedError, match="no decoder of words"):
                export(other, tool, "plan.json")


def test_a_batch_that_no_data_parallel_script_has_is_refused(tmp_path: Path) -> None:
    """Eight samples over 16 ranks: a plan with tp may take them, a DeepSpeed JSON cannot say it."""
    workload = Workload(seq_length=4096, global_batch_size=8)
    plan = make_plan("llama-2-7b", CLUSTER, workload, PlanOptions(pins={"tp": [2]}))
    assert plan.deepspeed()["train_micro_batch_size_per_gpu"] is None
    for tool in ("deepspeed", "accelerate"):
        with pytest.raises(UnsupportedError, match="no whole number for each of 16 ranks"):
            export(plan, tool, "plan.json")
    path = tmp_path / "plan.json"
    plan.save(path)
    assert main(["report", str(path), "--out", str(tmp_path / "r.html")]) == 0
    assert "no whole number for each of 16 ranks" in (tmp_path / "r.html").read_text()


def test_this_plugin_is_not_told_fp8() -> None:
    with pytest.raises(UnsupportedError, match="trains in fp8"):
        export(replace(planned("deepspeed"), precision="fp8"), "deepspeed", "plan.json")


def test_accelerate_is_told_of_processors() -> None:
    workload = Workload(seq_length=128, global_batch_size=4, precision="fp32")
    plan = make_plan("gpt2", "1x2xCPU", workload, PlanOptions())
    assert "use_cpu: true" in export(plan, "accelerate", "p.json").files["accelerate.yaml"]
    assert (
        "use_cpu: false"
        in export(planned("deepspeed"), "accelerate", "p.json").files["accelerate.yaml"]
    )

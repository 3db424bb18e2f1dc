"""Plans that experts know must come out by themselves, from the cost model and the search alone."""

from __future__ import annotations

from typing import Any

import pytest

from ds_autoplan.api import plan
from ds_autoplan.plan import Plan
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.workload import Workload


def made(
    model: Any, cluster: str, seq: int, batch: int, backend: str = "deepspeed", **pins: Any
) -> Plan:
    precision = pins.pop("precision", "bf16")
    workload = Workload(seq, batch, precision=precision, backend=backend)
    return plan(model, cluster, workload, PlanOptions(pins=pins))


def checkpointed(found: Plan) -> int:
    return sum(layer.strategy.activation_checkpointing != "none" for layer in found.layers)


def layers_per_stage(found: Plan) -> list[int]:
    return [end - first for first, end in found.stage_bounds]


def test_small_model_on_fast_links_is_pure_data_parallelism() -> None:
    found = made("gpt2-medium", "1x8xH100-SXM-80GB", 1024, 256)
    assert (found.degrees.tp, found.degrees.pp, found.degrees.dp) == (1, 1, 8)
    assert checkpointed(found) == 0


def test_tight_memory_takes_zero_before_anything_else() -> None:
    # 6.7 GB parameters: 108 GB of state per rank without ZeRO, 80 GB there are
    found = made("llama-2-7b", "1x8xA100-SXM-80GB", 2048, 128)
    assert (found.degrees.tp, found.degrees.pp, found.degrees.dp) == (1, 1, 8)
    assert found.degrees.zero_stage >= 1


def test_tighter_memory_takes_tensor_parallelism_inside_the_node() -> None:
    found = made("llama-2-13b", "1x8xA100-SXM-80GB", 2048, 64, zero_stage=[0, 1])
    assert 1 < found.degrees.tp <= 8
    assert found.degrees.pp == 1


def test_large_models_take_tp_inside_nodes_and_pp_across() -> None:
    found = made("gpt3-175b", "16x8xA100-SXM-80GB", 2048, 512)
    assert 1 < found.degrees.tp <= 8  # a node has 8
    assert found.degrees.pp > 1
    assert found.degrees.tp * found.degrees.pp > 8
    assert found.layers[0].strategy.sequence_parallel


def test_slow_network_and_deep_model_take_a_pipeline() -> None:
    slow = made("llama-2-13b", "8x4xA100-SXM-40GB,nic=10Gb", 2048, 256)
    assert slow.degrees.pp > 1
    assert slow.degrees.tp <= 4
    fast = made("llama-2-13b", "8x4xA100-SXM-40GB,nic=400Gb", 2048, 256)
    assert fast.degrees.dp > slow.degrees.dp


def test_long_sequence_takes_sequence_parallelism_and_checkpointing() -> None:
    found = made("llama-3-8b", "1x8xH100-SXM-80GB", 131072, 8)
    assert found.degrees.tp > 1
    assert all(layer.strategy.sequence_parallel for layer in found.layers)
    assert checkpointed(found) > 0
    short = made("llama-3-8b", "1x8xH100-SXM-80GB", 2048, 512)
    assert checkpointed(short) == 0


def test_huge_vocabulary_lightens_the_last_stage() -> None:
    found = made("gemma-2-9b", "1x8xA100-SXM-40GB", 4096, 64, pp=8)
    counts = layers_per_stage(found)
    assert sum(counts) == 42
    assert counts[-1] == min(counts)
    assert counts[-1] < max(counts) - 1


def test_pcie_only_box_takes_pp_before_tp() -> None:
    pcie = made("llama-2-13b", "1x8xA100-PCIe-80GB", 2048, 64, zero_stage=[0, 1])
    assert pcie.degrees.tp == 1
    assert pcie.degrees.pp > 1
    nvlink = made("llama-2-13b", "1x8xA100-SXM-80GB", 2048, 64, zero_stage=[0, 1])
    assert nvlink.degrees.tp > 1


def test_memory_makes_some_layers_checkpoint_not_all() -> None:
    pins = {"tp": 2, "pp": 8, "micro_batch_size": 1, "activation_checkpointing": "none"}
    free = PlanOptions(pins=pins, memory_reserve_gb=0.0)
    roomy = plan("llama-2-70b", "4x8xA100-SXM-80GB", Workload(2048, 512), free)
    del pins["activation_checkpointing"]
    # 20 GB less than the fullest stage needs: no cut alone makes up for that
    reserve = min(stage.margin_bytes for stage in roomy.stages) / 1e9 + 20.0
    tight = PlanOptions(pins=pins, memory_reserve_gb=reserve)
    found = plan("llama-2-70b", "4x8xA100-SXM-80GB", Workload(2048, 512), tight)
    assert 0 < checkpointed(found) < 80
    # the first stages keep most micro-batches in flight: they checkpoint more
    by_stage = [0] * found.degrees.pp
    for layer in found.layers:
        by_stage[layer.stage] += layer.strategy.activation_checkpointing != "none"
    assert sum(by_stage[:4]) > sum(by_stage[4:]) and by_stage[0] > by_stage[-1], by_stage


def test_megatron_backend_interleaves_a_deep_uneven_model() -> None:
    """The layout it was trained with: one layer less on the first and on the last stage."""
    job = ("llama-3-405b", "2048x8xH100-SXM-80GB", 8192, 2048, "megatron")
    trained = made(*job, tp=8, pp=16, cp=1)
    assert trained.degrees.dp == 128
    assert trained.degrees.vpp > 1
    assert layers_per_stage(trained) == [7, *[8] * 14, 7]
    assert made(*job).step_s <= trained.step_s


def test_experts_spread_under_the_megatron_backend() -> None:
    found = made("mixtral-8x7b", "2x8xH100-SXM-80GB", 4096, 256, backend="megatron")
    assert found.degrees.ep > 1


@pytest.mark.parametrize(
    ("model", "cluster", "seq", "batch"),
    [
        ("llama-2-7b", "1x8xA100-SXM-80GB", 2048, 128),
        ("llama-2-70b", "4x8xA100-SXM-80GB", 2048, 512),
        ("gemma-2-9b", "2x8xH100-SXM-80GB", 4096, 128),
        ("mixtral-8x7b", "2x8xH100-SXM-80GB", 4096, 256),
        ("t5-large", "1x8xA100-SXM-80GB", 512, 64),
        ({"model_type": "jamba"}, "4x8xH100-SXM-80GB", 4096, 256),
        ({"model_type": "lfm2"}, "1x8xA100-SXM-80GB", 4096, 64),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 6}, "4x8xH100-SXM-80GB", 4096, 256),
        ({"model_type": "gpt_oss"}, "4x8xH100-SXM-80GB", 4096, 256),
        ("bert-huge", "1x8xV100-SXM2-32GB", 512, 64),
        ("vit-huge", "1x8xV100-SXM2-32GB", 197, 512),
        ("swin-huge", "1x8xV100-SXM2-32GB", 3136, 64),
    ],
)
@pytest.mark.parametrize("backend", ["deepspeed", "megatron"])
def test_every_plan_is_what_the_cost_model_says(
    model: str, cluster: str, seq: int, batch: int, backend: str
) -> None:
    precision = "fp16" if "V100" in cluster else "bf16"
    found = made(model, cluster, seq, batch, backend, precision=precision)
    assert found.step_s == pytest.approx(found.solver.objective_s, rel=1e-9)
    assert found.solver.gap <= 1e-6
    assert all(stage.margin_bytes >= 0 for stage in found.stages)
    assert sum(layers_per_stage(found)) == len(found.layers)
    d = found.degrees
    assert d.dp * d.micro_batch_size * d.num_micro_batches == batch
    assert len(found.alternatives) >= 3
    steps = [other["step_s"] for other in found.alternatives]
    assert steps == sorted(steps)
    assert steps[0] >= found.step_s
    assert all(other["why"] for other in found.alternatives)
    assert found.assumptions

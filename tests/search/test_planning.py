"""The plan function: pins, reasons, limits, what-fits answers, determinism, files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.api import plan
from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost.interface import StageAssignment
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.errors import BadInputError, InfeasibleError
from ds_autoplan.explain import diff, why_not
from ds_autoplan.model import load_graph
from ds_autoplan.plan import Plan
from ds_autoplan.search.options import PlanOptions, normalise_pins, parse_pins
from ds_autoplan.search.space import (
    divisors,
    enumerate_space,
    interleaved_bounds,
    interleaved_cut,
    stage_order,
)
from ds_autoplan.strategy import Degrees
from ds_autoplan.workload import Workload

CLUSTER = "1x8xA100-SXM-80GB"
# three dense layers before the mixtures: the classes of a chunk depend on where it stands
INTERLEAVED: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 16,
    "first_k_dense_replace": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size": 32000,
}
SEVEN = Workload(2048, 128)
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
}


def reasons(pins: dict[str, Any], workload: Workload = SEVEN, **options: Any) -> str:
    with pytest.raises(InfeasibleError) as caught:
        plan("llama-2-7b", CLUSTER, workload, PlanOptions(pins=pins, **options))
    return str(caught.value)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_pinned_degrees_give_exactly_that_plan(tp: int, pp: int, checkpointing: str) -> None:
    if tp * pp > 4:
        return
    for zero_stage in (0, 1) if pp > 1 else (0, 1, 2, 3):
        pins = {
            "tp": tp,
            "pp": pp,
            "dp": 4 // (tp * pp),
            "zero_stage": zero_stage,
            "micro_batch_size": 2,
            "sequence_parallel": tp > 1,
            "activation_checkpointing": checkpointing,
            "attention": "heads",
            "mlp": "shard",
        }
        workload = Workload(64, 16, precision="fp32", gradient_accumulation_steps=1)
        found = plan(TINY, "1x4xCPU", workload, PlanOptions(pins=pins))
        d = found.degrees
        assert (d.tp, d.pp, d.dp) == (tp, pp, 4 // (tp * pp))
        assert (d.zero_stage, d.micro_batch_size) == (zero_stage, 2)
        assert d.num_micro_batches == 16 // (d.dp * 2)
        assert found.vocabulary == ("shard" if tp > 1 else "replicate")
        # 6 heads split over 2 ranks, not over 4; the MLP's 160 split over both
        attention = "heads" if tp < 4 else "replicate"
        for layer in found.layers:
            assert layer.strategy.attention == attention
            assert layer.strategy.mlp == "shard"
            assert layer.strategy.sequence_parallel == (tp > 1)
            assert layer.strategy.activation_checkpointing == checkpointing


def test_each_exclusion_has_its_reason() -> None:
    assert "tp=3 does not divide the 8 devices" in reasons({"tp": 3})
    assert "ZeRO stages 0 and 1 only" in reasons({"pp": 2, "zero_stage": 3})
    assert "pipeline parallelism is switched off" in reasons({"pp": 2}, pipeline=False)
    assert "tensor parallelism is switched off" in reasons({"tp": 2}, tensor_parallel=False)
    assert "no context parallelism" in reasons({"cp": 2})
    assert "no interleaved stages" in reasons({"pp": 2, "vpp": 2})
    assert "ep=2 does not divide the 1 experts" in reasons({"ep": 2})
    assert "micro_batch_size=3 does not divide" in reasons({"micro_batch_size": 3}).replace(
        "which micro_batch_size=3 does not divide", "micro_batch_size=3 does not divide"
    )
    assert "does not divide over dp=8" in reasons({"dp": 8}, Workload(2048, 100))
    odd = Workload(2047, 128)
    assert "2047 does not divide by tp=2" in reasons({"tp": 2, "sequence_parallel": True}, odd)
    accumulated = replace(SEVEN, gradient_accumulation_steps=5)
    assert "5 accumulation steps" in reasons({"dp": 8}, accumulated)
    rule = "tp * pp * dp * cp must be the 8 devices, which no choice of"
    four = {"tp": 2, "pp": 2, "dp": 1, "cp": 1}
    assert f"{rule} tp=2, pp=2, dp=1, cp=1 allows" in reasons(four)
    assert f"{rule} tp=8, pp=8 allows" in reasons({"tp": 8, "pp": 8})
    assert f"{rule} tp=1 or 2, pp=1, dp=1 allows" in reasons({"tp": [1, 2], "pp": 1, "dp": 1})


def test_a_pass_is_one_engine_call_under_deepspeed() -> None:
    """Four calls a step pay the bubble four times, and bound the micro-batches of a pass."""
    pins = {"tp": 1, "pp": 4, "dp": 2, "micro_batch_size": 1, "zero_stage": 1}
    options = PlanOptions(pins={**pins, "activation_checkpointing": "full"})
    one = plan("llama-2-7b", CLUSTER, replace(SEVEN, gradient_accumulation_steps=1), options)
    four = plan("llama-2-7b", CLUSTER, replace(SEVEN, gradient_accumulation_steps=4), options)
    assert one.degrees == four.degrees
    assert four.step_s > one.step_s
    ratio = four.breakdown_s["bubble"] / one.breakdown_s["bubble"]
    assert ratio == pytest.approx(4, rel=0.2)
    per_call = 128 // (2 * 4)  # samples a replica gets per call
    for size in divisors(128):
        allowed = per_call % size == 0
        space = enumerate_space(
            load_graph("llama-2-7b"),
            8,
            replace(SEVEN, gradient_accumulation_steps=4),
            PlanOptions(pins={**pins, "micro_batch_size": size}),
        )
        assert bool(space.candidates) == allowed, size


def test_sixteen_bits_without_zero_are_left_out_under_model_parallelism() -> None:
    graph = load_graph(TINY)
    half = Workload(64, 16, precision="bf16", gradient_clipping=1.0)
    for pins in ({"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}, {"tp": 1, "pp": 1}):
        space = enumerate_space(graph, 4, half, PlanOptions(pins=pins))
        stages = {c.degrees.zero_stage for c in space.candidates if c.degrees.dp > 1}
        assert (0 in stages) == (pins["tp"] * pins["pp"] == 1)
    pinned = enumerate_space(graph, 4, half, PlanOptions(pins={"tp": 2, "zero_stage": 0}))
    assert not pinned.candidates
    assert any("gradient norm" in reason for reason in pinned.excluded.values())
    full = replace(half, precision="fp32")
    assert enumerate_space(graph, 4, full, PlanOptions(pins={"pp": 2, "zero_stage": 0})).candidates


def test_interleaving_counts_embedding_and_head_as_layers() -> None:
    assert interleaved_cut(96, 8, 6) == (0, 0)
    assert interleaved_cut(126, 16, 8) == (1, 1)  # 128 = 126 + 2
    assert interleaved_cut(127, 16, 8) == (0, 1)
    assert interleaved_cut(80, 16, 3) is None


def test_interleaved_stages_hold_every_pp_th_chunk() -> None:
    assert stage_order(8, Degrees(pp=2, vpp=2)) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert interleaved_bounds(8, Degrees(pp=2, vpp=2)) == (0, 4, 8)
    # embedding and head count as a layer each: chunks of 2, the first and the last one of 1
    assert stage_order(6, Degrees(pp=2, vpp=2)) == (0, 3, 4, 1, 2, 5)
    assert interleaved_bounds(6, Degrees(pp=2, vpp=2)) == (0, 3, 6)
    assert stage_order(5, Degrees(pp=2)) == (0, 1, 2, 3, 4)
    for layers, pp, vpp in ((126, 16, 8), (127, 16, 8), (96, 8, 6)):
        order = stage_order(layers, Degrees(pp=pp, vpp=vpp))
        bounds = interleaved_bounds(layers, Degrees(pp=pp, vpp=vpp))
        assert sorted(order) == list(range(layers))
        assert bounds is not None
        for first, end in zip(bounds, bounds[1:], strict=False):
            assert end > first
            assert list(order[first:end]) == sorted(order[first:end])


def test_interleaved_plans_list_each_layer_with_its_own_stage_and_strategy() -> None:
    """A stage is priced as the layers that the plan lists for it, dense or not."""
    graph = load_graph(INTERLEAVED)
    cluster = parse_cluster("1x8xA100-SXM-80GB")
    workload = Workload(2048, 64, precision="bf16", backend="megatron")
    pins = {"pp": [4], "vpp": [2], "tp": [1], "ep": [1], "cp": [1], "micro_batch_size": [2]}
    options = PlanOptions(pins=pins, memory_reserve_gb=70, prove=True)
    found = plan(graph, cluster, workload, options)
    assert found.report["proof"]["status"] == "optimal"
    assert found.report["proof"]["agrees"]
    assert [layer.index for layer in found.layers] == list(range(graph.num_layers))
    assert [layer.stage for layer in found.layers] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert len({layer.strategy for layer in found.layers}) > 1  # memory binds in the first stages
    own = [[layer for layer in found.layers if layer.stage == stage] for stage in range(4)]
    stages = tuple(
        StageAssignment(tuple(x.index for x in part), tuple(x.strategy for x in part))
        for part in own
    )
    cost = AnalyticCostModel(graph, cluster, workload)
    priced = cost.step(found.degrees, stages, found.vocabulary)
    assert priced.step_s == pytest.approx(found.step_s, rel=1e-9)
    for stage, estimate in zip(found.stages, priced.stages, strict=True):
        assert stage.peak_bytes == pytest.approx(estimate.peak_bytes, rel=1e-9)


def test_same_input_same_plan() -> None:
    first = plan("llama-2-13b", "2x8xV100-SXM2-32GB", Workload(2048, 128, "fp16")).to_json()
    again = plan("llama-2-13b", "2x8xV100-SXM2-32GB", Workload(2048, 128, "fp16")).to_json()
    for answer in (first, again):
        del answer["plan"]["solver"]["seconds"]
    assert json.dumps(first) == json.dumps(again)


def test_saved_plan_loads_and_remembers_its_inputs(tmp_path: Path) -> None:
    found = plan("llama-2-7b", CLUSTER, SEVEN)
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.fingerprint == found.fingerprint
    assert diff(found, loaded)["same"]
    answer = why_not(loaded, parse_pins(["tp=8,pp=1"]))
    assert answer["verdict"] == "slower"
    assert answer["plan"]["tp"] == 8
    assert "slower a step" in answer["reason"]


def test_graph_as_input_is_remembered_too(tmp_path: Path) -> None:
    found = plan(load_graph("gemma-2-9b"), CLUSTER, SEVEN)
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    pins = {name: (getattr(found.degrees, name),) for name in ("tp", "pp", "dp", "zero_stage")}
    pins["micro_batch_size"] = (found.degrees.micro_batch_size,)
    pins["sequence_parallel"] = (found.layers[0].strategy.sequence_parallel,)
    assert why_not(loaded, pins)["verdict"] == "chosen"


def test_why_not_names_rule_memory_and_pins() -> None:
    found = plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(pins={"tp": 2}))
    rule = why_not(found, parse_pins(["pp=2,zero_stage=3"]))
    assert rule["verdict"] == "infeasible"
    assert "ZeRO stages 0 and 1 only" in rule["reason"]
    memory = why_not(found, parse_pins(["tp=1,pp=1,zero_stage=0"]))
    assert memory["verdict"] == "infeasible"
    assert "GB per device too many" in memory["reason"]
    pinned = why_not(found, parse_pins(["tp=1"]))
    assert pinned["pinned_otherwise"] == {"tp": [2]}
    assert pinned["verdict"] == "faster"
    assert "pins" in pinned["reason"]


def test_infeasible_lists_priced_relaxations() -> None:
    options = PlanOptions(pins={"zero_stage": 0, "tp": 1, "pp": 1})
    with pytest.raises(InfeasibleError) as caught:
        plan("llama-2-13b", CLUSTER, Workload(2048, 64, precision="fp32"), options)
    ways = caught.value.details["relaxations"]
    assert {"zero_stage", "tp", "pp"} <= {way["change"] for way in ways}
    assert all(way["step_s"] > 0 for way in ways)
    assert [way["step_s"] for way in ways] == sorted(way["step_s"] for way in ways)
    assert "What would fit: zero_stage=" in str(caught.value)
    for way in ways:
        if way["change"] in options.pins:
            pins = {**options.pins, way["change"]: way["value"]}
            again = plan(
                "llama-2-13b", CLUSTER, Workload(2048, 64, precision="fp32"), PlanOptions(pins=pins)
            )
            assert again.step_s == pytest.approx(way["step_s"], rel=1e-9)


def test_more_devices_are_a_way_out() -> None:
    with pytest.raises(InfeasibleError) as caught:
        plan("llama-2-70b", CLUSTER, Workload(4096, 96))
    changes = {way["change"]: way["value"] for way in caught.value.details["relaxations"]}
    assert changes["devices"] in (16, 24, 32)


def total_gb() -> float:
    """Memory of a device: what a plan without reserve uses and has left."""
    stage = plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(memory_reserve_gb=0.0)).stages[0]
    return (stage.peak_bytes + stage.margin_bytes) / 1e9


def test_less_reserve_is_a_way_out() -> None:
    found = plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(pins={"zero_stage": 3, "tp": 1}))
    pins = {
        "tp": 1,
        "pp": 1,
        "zero_stage": 3,
        "micro_batch_size": found.degrees.micro_batch_size,
        "activation_checkpointing": "none",
    }
    peak = found.stages[0].peak_bytes / 1e9
    total = total_gb()
    too_much = total - peak + 0.5
    with pytest.raises(InfeasibleError) as caught:
        plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(pins=pins, memory_reserve_gb=too_much))
    ways = {way["change"]: way["value"] for way in caught.value.details["relaxations"]}
    assert total - peak - 0.5 < ways["memory_reserve_gb"] <= total - peak


def test_reserve_is_left_free() -> None:
    total = total_gb()
    assert 79 < total < 86
    for reserve in (0.0, 10.0, 40.0):
        found = plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(memory_reserve_gb=reserve))
        peak = max(stage.peak_bytes for stage in found.stages)
        assert peak <= (total - reserve) * 1e9
        assert found.stages[0].margin_bytes == pytest.approx((total - reserve) * 1e9 - peak, abs=2)
    with pytest.raises(BadInputError, match="memory_reserve_gb is 90"):
        plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(memory_reserve_gb=90.0))


def test_time_limit_keeps_the_best_and_states_the_gap() -> None:
    options = PlanOptions(time_limit_s=1e-9)
    found = plan("gpt3-175b", "16x8xA100-SXM-80GB", Workload(2048, 512), options)
    assert found.solver.status == "time limit"
    assert found.solver.gap > 0
    best = plan("gpt3-175b", "16x8xA100-SXM-80GB", Workload(2048, 512))
    assert found.solver.bound_s <= best.step_s * (1 + 1e-9)
    assert best.solver.gap == 0


def test_volume_baseline_is_never_faster_than_the_topology_plan() -> None:
    workload = Workload(2048, 256)
    cluster = "4x4xA100-SXM-40GB,nic=10Gb"
    by_time = plan("llama-2-13b", cluster, workload)
    by_volume = plan("llama-2-13b", cluster, workload, PlanOptions(cost="volume"))
    assert by_volume.step_s >= by_time.step_s * (1 - 1e-9)
    assert by_volume.fingerprint != by_time.fingerprint


def test_ablations_are_never_faster_than_joint() -> None:
    workload = Workload(2048, 256)
    joint = plan("llama-2-13b", "4x4xA100-SXM-40GB", workload)
    for ablation in ("inter", "intra"):
        part = plan("llama-2-13b", "4x4xA100-SXM-40GB", workload, PlanOptions(ablation=ablation))
        assert part.step_s >= joint.step_s * (1 - 1e-9)


def test_gpipe_keeps_more_in_flight() -> None:
    pins = {"pp": 8, "tp": 1, "micro_batch_size": 1}
    normal = plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(pins=pins))
    gpipe = plan("llama-2-7b", CLUSTER, SEVEN, PlanOptions(pins=pins, schedule="gpipe"))
    assert gpipe.step_s > normal.step_s  # memory makes it recompute


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (Workload(0, 8), "seq_length is 0"),
        (Workload(8, -1), "global_batch_size is -1"),
        (Workload(8, 8, precision="int4"), "precision is 'int4'"),
        (Workload(8, 8, backend="jax"), "backend is 'jax'"),
    ],
)
def test_bad_workloads(workload: Workload, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        plan("llama-2-7b", CLUSTER, workload)


def test_learned_positions_bound_the_sequence() -> None:
    with pytest.raises(BadInputError, match="1024 learned positions"):
        plan("gpt2", "1x4xCPU", Workload(2048, 8, precision="fp32"))


def test_pins_are_checked() -> None:
    with pytest.raises(BadInputError, match="Did you mean 'zero_stage'"):
        normalise_pins({"zero": 1})
    with pytest.raises(BadInputError, match="0, 1, 2 or 3"):
        normalise_pins({"zero_stage": 4})
    with pytest.raises(BadInputError, match="positive integer"):
        normalise_pins({"tp": 0})
    with pytest.raises(BadInputError, match="positive integer"):
        normalise_pins({"tp": True})
    with pytest.raises(BadInputError, match="one of: none, selective, full"):
        normalise_pins({"activation_checkpointing": "half"})
    with pytest.raises(BadInputError, match="empty list"):
        normalise_pins({"tp": []})
    assert normalise_pins({"tp": [4, 2, 2], "pp": None}) == {"tp": (2, 4)}
    assert parse_pins(["tp=8,pp=1,2", "sequence_parallel=true"]) == {
        "tp": (8,),
        "pp": (1, 2),
        "sequence_parallel": (True,),
    }
    for text in ("tp", "tp=", "=4", "tp=x"):
        with pytest.raises(BadInputError):
            parse_pins([text])


@pytest.mark.parametrize(
    ("model", "cluster", "pins"),
    [
        ("llama-2-7b", CLUSTER, {}),
        ("llama-2-7b", "1x8xRTX4090", {"tp": 4, "pp": 2}),  # memory binds
        ("gemma-2-9b", CLUSTER, {"pp": 2}),  # two block classes
    ],
)
def test_highs_proves_the_winner(model: str, cluster: str, pins: dict[str, Any]) -> None:
    found = plan(model, cluster, SEVEN, PlanOptions(pins=pins, prove=True))
    proof = found.report["proof"]
    assert proof["status"] == "optimal"
    assert proof["agrees"]
    assert proof["gap"] <= 1e-6
    assert proof["objective_s"] == pytest.approx(found.solver.objective_s, rel=1e-6)


def test_the_package_has_plan_as_a_function() -> None:
    import ds_autoplan

    found = ds_autoplan.plan("llama-2-7b", CLUSTER, SEVEN)
    assert isinstance(found, ds_autoplan.Plan)
    assert found.fingerprint == plan("llama-2-7b", CLUSTER, SEVEN).fingerprint


def test_highs_proves_where_someone_used_it_with_other_threads() -> None:
    """HiGHS has one pool of threads a process; the first user's number binds the others."""
    import pulp

    problem = pulp.LpProblem("other", pulp.LpMaximize)
    amount = problem.add_variable("amount", 0, 3, "Integer")
    problem += amount
    problem += 2 * amount <= 5
    problem.solve(pulp.HiGHS(msg=False, threads=2))
    job = ("llama-2-7b", "1x8xA100-SXM-80GB", Workload(2048, 64))
    proof = plan(*job, PlanOptions(prove=True)).report["proof"]
    assert proof["status"] == "optimal" and proof["agrees"]

"""Properties that any cost must have, whatever its constants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.errors import UnsupportedError
from ds_autoplan.estimate import even_cut
from ds_autoplan.model import load_graph
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload
from tests.cost.samples import DEGREES, LLAMA, WORKLOAD, price


def peak(estimate: object) -> int:
    return max(stage.peak_bytes for stage in estimate.stages)  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", ["megatron", "deepspeed"])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_time_and_memory_grow_with_layers_and_sequence(backend: str, checkpointing: str) -> None:
    strategy = Strategy(activation_checkpointing=checkpointing)
    by_layers = [
        price(model={"num_hidden_layers": n}, strategy=strategy, backend=backend)
        for n in (8, 16, 32, 64)
    ]
    by_length = [
        price(seq_length=s, strategy=strategy, backend=backend) for s in (512, 2048, 8192, 32768)
    ]
    for family in (by_layers, by_length):
        assert [e.step_s for e in family] == sorted(e.step_s for e in family)
        assert [peak(e) for e in family] == sorted(peak(e) for e in family)
        assert family[0].step_s < family[-1].step_s and peak(family[0]) < peak(family[-1])


def test_time_grows_with_width_and_micro_batches() -> None:
    widths = [price(model={"intermediate_size": f}).step_s for f in (4096, 8192, 16384)]
    micro = [
        price(degrees=replace(DEGREES, num_micro_batches=m), global_batch_size=4 * m).step_s
        for m in (2, 4, 8, 16)
    ]
    assert widths == sorted(widths) and micro == sorted(micro)


def test_more_tokens_are_never_faster_in_a_mixture() -> None:
    """Down to less than a row for each expert, where padding is most of the work."""
    times = []
    for length in (1, 4, 16, 64, 256, 1024):
        workload = Workload(length, 8, backend="megatron")
        cost = AnalyticCostModel(
            load_graph("deepseek-v3"), parse_cluster("1x8xH100-SXM-80GB"), workload
        )
        mixture = len(cost.graph.classes) - 1
        layer = cost.layer(mixture, Strategy(), Degrees(dp=8, ep=8, zero_stage=1))
        times.append(layer.forward_s + layer.backward_s)
    assert times == sorted(times)


def test_one_rank_pays_no_communication() -> None:
    degrees = Degrees(num_micro_batches=64)
    estimate = price("1x1xH100-SXM-80GB", degrees)
    for cause in ("tp", "pp", "dp", "cp", "ep", "bubble"):
        assert estimate.breakdown_s[cause] == pytest.approx(0.0, abs=1e-9)


def test_breakdown_adds_up_to_the_step() -> None:
    estimate = price()
    assert sum(estimate.breakdown_s.values()) == pytest.approx(estimate.step_s)
    assert all(value >= 0 for value in estimate.breakdown_s.values())


def test_a_slower_network_never_makes_a_step_faster() -> None:
    steps = [
        price(f"2x8xA100-SXM-80GB,nic={rate}Gb", backend="deepspeed").step_s
        for rate in (400, 200, 100, 10, 1)
    ]
    assert steps == sorted(steps)


def test_the_step_is_the_sum_that_the_interface_states() -> None:
    graph = load_graph(LLAMA)
    workload = replace(WORKLOAD, backend="deepspeed", gradient_accumulation_steps=4)
    cost = AnalyticCostModel(graph, parse_cluster("2x8xA100-SXM-80GB"), workload)
    strategy = Strategy(sequence_parallel=True)
    stages = even_cut(graph.num_layers, 2, strategy)
    layer = cost.layer(0, strategy, DEGREES)
    head = cost.head(DEGREES, "shard", True)
    embedding = cost.embedding(DEGREES, "shard", True)
    own = 16 * (layer.forward_s + layer.backward_s)
    first = own + embedding.forward_s + embedding.backward_s + cost.boundary_s(DEGREES, strategy)
    last = own + head.forward_s + head.backward_s
    per_step = max(
        16 * layer.per_step_s + embedding.per_step_s, 16 * layer.per_step_s + head.per_step_s
    )
    expected = 4 * (first + last) + (16 - 4) * max(first, last)
    expected += per_step + cost.step_constant_s(DEGREES)
    estimate = cost.step(DEGREES, stages, "shard")
    assert estimate.step_s == pytest.approx(expected, rel=1e-9)
    sent, held = cost.stage_buffers(DEGREES, 0, True)
    activations = cost.in_flight(0, DEGREES) * (
        16 * layer.activation_bytes + embedding.activation_bytes + sent
    )
    overhead = cost.fixed_bytes(DEGREES) + held
    assert estimate.stages[0].memory["overhead"] == pytest.approx(overhead, abs=2)
    assert estimate.stages[0].memory["activations"] == pytest.approx(activations, abs=2)


def test_accumulation_pays_the_bubble_once_per_call_under_deepspeed() -> None:
    one = price(backend="deepspeed", gradient_accumulation_steps=1).breakdown_s["bubble"]
    four = price(backend="deepspeed", gradient_accumulation_steps=4).breakdown_s["bubble"]
    assert four == pytest.approx(4 * one, rel=1e-6)
    assert price(gradient_accumulation_steps=4).breakdown_s["bubble"] == pytest.approx(
        price().breakdown_s["bubble"]
    )


def test_zero_stages_save_what_they_promise() -> None:
    memory = {}
    for stage in range(4):
        degrees = Degrees(dp=16, zero_stage=stage, num_micro_batches=4)
        memory[stage] = price(degrees=degrees, backend="deepspeed").stages[0].memory
    assert memory[0]["optimizer"] == pytest.approx(16 * memory[1]["optimizer"], rel=1e-6)
    assert memory[1]["gradients"] == pytest.approx(16 * memory[2]["gradients"], rel=1e-6)
    assert memory[2]["parameters"] == pytest.approx(16 * memory[3]["parameters"], rel=1e-6)


@pytest.mark.parametrize(
    ("precision", "zero_stage", "bytes_per_parameter"),
    [
        # DeepSpeed 0.19 on two ranks, counted from live tensors between backward and step:
        # parameters, gradients, and (32-bit copy and two moments) over the shards.
        ("fp32", 0, 16.0),
        ("fp32", 1, 14.0),
        ("fp32", 2, 12.0),
        ("fp32", 3, 10.0),
        ("bf16", 0, 16.0),
        ("bf16", 1, 10.0),
        ("bf16", 2, 9.0),
        ("bf16", 3, 8.0),
    ],
)
def test_states_are_those_of_the_real_engine(
    precision: str, zero_stage: int, bytes_per_parameter: float
) -> None:
    graph = load_graph(LLAMA)
    degrees = Degrees(dp=2, zero_stage=zero_stage, num_micro_batches=32)
    memory = (
        price("1x2xA100-SXM-80GB", degrees, precision=precision, backend="deepspeed")
        .stages[0]
        .memory
    )
    states = memory["parameters"] + memory["gradients"] + memory["optimizer"]
    assert states / graph.num_parameters == pytest.approx(bytes_per_parameter, rel=1e-3)


def test_tensor_parallelism_halves_sharded_activations_with_sequence_parallelism() -> None:
    kept = []
    for tp in (1, 2, 4, 8):
        degrees = Degrees(tp=tp, dp=16 // tp, zero_stage=1, num_micro_batches=4 * tp)
        graph = load_graph(LLAMA)
        cost = AnalyticCostModel(graph, parse_cluster("2x8xA100-SXM-80GB"), WORKLOAD)
        strategy = Strategy(sequence_parallel=tp > 1)
        kept.append(cost.layer(0, strategy, degrees).activation_bytes)
    for one, two in zip(kept, kept[1:], strict=False):
        assert one == pytest.approx(2 * two, rel=1e-6)


def test_checkpointing_trades_memory_for_time() -> None:
    estimates = {
        mode: price(strategy=Strategy(activation_checkpointing=mode))
        for mode in ("none", "selective", "full")
    }
    assert peak(estimates["full"]) < peak(estimates["none"])
    assert estimates["full"].step_s > 1.15 * estimates["none"].step_s
    assert estimates["none"].step_s < estimates["selective"].step_s < estimates["full"].step_s


def test_interleaving_shrinks_the_bubble_and_costs_memory() -> None:
    plain = Degrees(pp=8, dp=2, zero_stage=1, num_micro_batches=32)
    interleaved = replace(plain, vpp=4)
    one, four = price(degrees=plain), price(degrees=interleaved)
    assert four.breakdown_s["bubble"] < 0.5 * one.breakdown_s["bubble"]
    assert four.stages[0].memory["activations"] > one.stages[0].memory["activations"]


def test_ranges_hold_the_prediction_and_widen_where_nothing_is_calibrated() -> None:
    known, unknown = price(), price("2x8xMI300X")
    for estimate in (known, unknown):
        low, high = estimate.range_s
        assert low < estimate.step_s < high
    assert known.uncalibrated_fraction < 0.05 < unknown.uncalibrated_fraction
    spread = [(e.range_s[1] - e.range_s[0]) / e.step_s for e in (known, unknown)]
    assert spread[0] < spread[1]


def test_volume_cost_ignores_where_an_axis_lies() -> None:
    graph, topology = load_graph(LLAMA), parse_cluster("2x8xA100-SXM-80GB")
    inside = Degrees(tp=2, dp=8, zero_stage=0, num_micro_batches=8)
    outside = replace(inside, order="dp-cp-ep-tp-pp")
    prices = {}
    for volume in (True, False):
        cost = AnalyticCostModel(graph, topology, WORKLOAD, volume_only=volume)
        prices[volume] = [
            cost.layer(0, Strategy(), degrees).communication_s for degrees in (inside, outside)
        ]
    assert prices[True][0] == pytest.approx(prices[True][1])
    assert prices[False][1] > 5 * prices[False][0]


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="does not compute in fp8"):
        price("1x8xA100-SXM-80GB", Degrees(dp=8, num_micro_batches=8), precision="fp8")


def test_measured_rates_are_taken_as_they_are() -> None:
    graph, guessed = load_graph(LLAMA), parse_cluster("1x4xCPU")
    measured = replace(guessed, calibrated=True)
    degrees = Degrees(dp=4, num_micro_batches=16)
    strategy = Strategy()
    steps = []
    for topology in (guessed, measured):
        cost = AnalyticCostModel(graph, topology, replace(WORKLOAD, precision="fp32"))
        steps.append(cost.step(degrees, even_cut(32, 1, strategy), "shard"))
    assert steps[1].step_s < steps[0].step_s
    assert steps[1].uncalibrated_fraction == 0.0 < steps[0].uncalibrated_fraction

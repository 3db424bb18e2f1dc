"""The benchmarks' claims, on their own figures (ratios within one run, no absolute times)."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import tapas, taps
from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.model import load_graph
from ds_autoplan.search.patterns import PATTERNS, BlockPatterns, vocabulary
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload


def test_topology_pricing_gains_over_volume() -> None:
    rows = taps.sweep()
    assert {row["nodes"] for row in rows} == set(taps.NODES)
    for row in rows:
        assert 0 <= row["reduction_best_tie"] <= row["reduction"] < 1
        if row["nodes"] == 1:
            assert row["reduction"] == 0  # ties at one node
    assert max(row["reduction"] for row in rows) >= 0.85
    for nodes in (2, 4, 8):  # the gain grows with the bandwidth ratio
        gains = [row["reduction"] for row in rows if row["nodes"] == nodes]
        assert gains == sorted(gains)


def test_folding_finds_the_optimum_of_the_operator_programs() -> None:
    for depth in (2, 5, 12):
        case = tapas.Case(depth)
        truth = tapas.folded(case)
        assert truth is not None
        assert tapas.unfolded(case) == pytest.approx(truth, rel=1e-6)
        assert tapas.alpa(case) == pytest.approx(truth, rel=1e-6)


def test_enumeration_equals_pricing_each_pattern() -> None:
    block = tapas.Case(1).block()
    total, connected = block.enumerate()
    by_hand = {}
    for names in itertools.product(PATTERNS, repeat=len(block.nodes)):
        priced = block.price(names)
        if priced is not None:
            by_hand[names] = priced
    assert total == 81
    assert len(connected) == len(by_hand) < total
    for pattern in connected:
        assert pattern.time_s == pytest.approx(by_hand[pattern.names].time_s, rel=1e-12)
        assert pattern.bytes == by_hand[pattern.names].bytes


def test_column_then_row_on_fast_links_and_less_sharding_on_slow_ones() -> None:
    assert tapas.best_pattern(1.0) == "column row column row"
    slow = [tapas.best_pattern(scale) for scale in (0.1, 0.07, 0.06, 0.05, 0.04, 0.03, 0.01)]
    assert "replicate replicate column row" in slow  # the MLP only
    sharded = [sum(name != "replicate" for name in names.split()) for names in slow]
    assert sharded == sorted(sharded, reverse=True)
    assert sharded[-1] == 0


def test_folded_search_does_not_grow_with_depth_and_the_operator_program_does() -> None:
    """Ratios of CPU time within this run."""
    shallow, deep = tapas.Case(12), tapas.Case(192)
    assert tapas.timed(tapas.folded, deep)[0] < 3 * tapas.timed(tapas.folded, shallow)[0]
    case = tapas.Case(48)
    assert tapas.timed(tapas.alpa, case)[0] > 40 * tapas.timed(tapas.folded, case)[0]


def test_experts_are_split_by_width_or_whole_or_not_at_all() -> None:
    cost, degrees = _cost("mixtral-8x7b", 4)
    block = BlockPatterns(cost, cost.graph.classes[0], degrees)
    assert [node.name for node in block.nodes] == ["qkv", "out", "experts"]
    experts = block.nodes[-1]
    assert set(experts.legal) == {"replicate", "shard", "expert"}
    whole, by_width, by_expert = (
        block.node_price(experts, name) for name in ("replicate", "shard", "expert")
    )
    # a quarter of the weights and of the kept intermediates, but not of the GEMMs' fixed costs
    assert by_expert[1] == pytest.approx(whole[1] / 4, rel=1e-12)
    assert whole[0] / 4 <= by_expert[0] < whole[0]
    assert whole[0] / 4 <= by_width[0] < whole[0]
    total, connected = block.enumerate()
    assert total == 27
    # what is partial is reduced on its way to the stream; replicated experts need nothing
    assert block.edge_s(2, "replicate", None) == 0
    reduced = block.edge_s(2, "shard", None)
    assert reduced is not None
    assert reduced > 0
    odd = _cost("mixtral-8x7b", 16)
    assert "expert" not in BlockPatterns(odd[0], odd[0].graph.classes[0], odd[1]).nodes[-1].legal


def test_norms_under_sequence_parallelism_keep_less_and_move_as_much() -> None:
    """Sharded by tokens, all-reduces become an all-gather and a reduce-scatter."""
    cost, degrees = _cost("llama-2-7b", 4)
    block = BlockPatterns(cost, cost.graph.classes[0], degrees)
    megatron = ("column", "row", "column", "row")
    plain, sequence = block.price(megatron), block.price(megatron, "sequence")
    assert plain is not None
    assert sequence is not None
    size = block.norm_price("replicate")[1]
    assert plain.bytes - sequence.bytes == pytest.approx(size * 3 / 4, rel=1e-12)
    assert block.norm_price("sequence")[0] < block.norm_price("replicate")[0]
    stream = cost.setting.tokens(degrees) * 4096 * 2

    def moved(norm: str) -> float:
        price = block.price(megatron, norm)
        assert price is not None
        nodes = sum(
            block.node_price(node, name, norm)[0]
            for node, name in zip(block.nodes, megatron, strict=True)
        )
        cores = block.core_price("qkv", "S") + block.core_price("up", "S")
        return price.time_s - nodes - cores - block.norm_price(norm)[0]

    def seconds(kind: str) -> float:
        return cost.setting.collective(kind, stream, degrees, "tp")

    # beside what column nodes add backward (all-reduce, or reduce-scatter of the same)
    assert moved("replicate") == pytest.approx(2 * seconds("all_reduce"), rel=1e-9)
    halves = 2 * (seconds("all_gather") + seconds("reduce_scatter"))
    assert moved("sequence") == pytest.approx(halves, rel=1e-9)
    _, both = block.enumerate(("replicate", "sequence"))
    for pattern in both:
        by_hand = block.price(pattern.names, pattern.norm)
        assert by_hand is not None
        assert pattern.time_s == pytest.approx(by_hand.time_s, rel=1e-12)
        assert pattern.bytes == pytest.approx(by_hand.bytes, rel=1e-12)
    assert {pattern.norm for pattern in both} == {"replicate", "sequence"}


def test_a_tied_embedding_and_head_are_sharded_alike() -> None:
    for model, tied in (("llama-2-7b", False), ("gemma-2-9b", True)):
        cost, degrees = _cost(model, 4)
        assert cost.graph.tied == tied
        total, connected = vocabulary(cost, degrees)
        assert total == 4
        assert len(connected) == (2 if tied else 4)
        for choice in connected:
            assert not tied or choice.strategy.attention == choice.strategy.mlp
        sharded = next(c for c in connected if c.strategy == Strategy("shard", "shard"))
        whole = next(c for c in connected if c.strategy == Strategy("replicate", "replicate"))
        assert sharded.state_bytes == pytest.approx(whole.state_bytes / 4, rel=0.01)


def _cost(model: str, tp: int) -> tuple[AnalyticCostModel, Degrees]:
    place = parse_cluster("2x8xA100-SXM-80GB")
    degrees = Degrees(tp=tp, dp=16 // tp, micro_batch_size=1, num_micro_batches=1)
    return AnalyticCostModel(load_graph(model), place, Workload(2048, 16)), degrees

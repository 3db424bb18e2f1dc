"""The benchmarks' claims, on their own figures (ratios within one run, no absolute times)."""

from __future__ import annotations

import itertools

import pytest

from benchmarks import tapas, taps
from ds_autoplan.search.patterns import PATTERNS


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

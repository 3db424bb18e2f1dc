"""The benchmarks' claims, on their own figures (ratios within one run, no absolute times)."""

from __future__ import annotations

from benchmarks import taps


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

"""What collectives cost: the arithmetic of the formulas, and the properties any cost must have."""

from __future__ import annotations

import itertools

import pytest

from ds_autoplan.cluster import Level, Topology, parse_cluster
from ds_autoplan.cluster.collectives import (
    KINDS,
    collective_s,
    exchange_s,
    point_to_point_s,
    ring_s,
    volume_bytes,
)
from ds_autoplan.strategy import Degrees

CLUSTERS = ("1x8xA100-SXM-80GB", "4x8xH100-SXM-80GB", "2x8xA100-PCIe-80GB", "32x4xGB200", "1x4xCPU")


def two_nodes() -> Topology:
    """2 nodes x 4 GPUs, 100 GB/s inside, one 10 GB/s NIC a node, no latency."""
    device = parse_cluster("1x1xA100").device
    return Topology(device, (Level("node", 4, 100e9, 0.0), Level("cluster", 8, 10e9 / 4, 0.0)))


def test_equal_volume_costs_different_time_by_placement() -> None:
    # Activations 1 GB, weights 0.1 GB, tp 2 x dp 4. Per rank: tp all-reduces 1/4 of the activations
    # (2*(1/2)*0.25 = 0.25 GB), dp all-reduces half the weights (2*(3/4)*0.05 = 0.075 GB).
    # tp inside: 0.25/100 + 0.075/(10/2) = 2.5 + 15 ms; across: 0.25/(10/4) + 0.075/100 = 100 +
    # 0.75 ms.
    topology = two_nodes()
    inside = topology.span(2, 1), topology.span(4, 2)
    across = topology.span(2, 4), topology.span(4, 1)
    times, volumes = [], []
    for tp, dp in (inside, across):
        times.append(
            ring_s(topology, "all_reduce", 0.25e9, tp) + ring_s(topology, "all_reduce", 0.05e9, dp)
        )
        volumes.append(
            volume_bytes("all_reduce", 0.25e9, tp) + volume_bytes("all_reduce", 0.05e9, dp)
        )
    assert volumes == [pytest.approx(0.325e9), pytest.approx(0.325e9)]
    assert times == [pytest.approx(17.5e-3), pytest.approx(100.75e-3)]


def test_hierarchical_all_reduce_is_taken_where_it_is_cheaper() -> None:
    # (2, 2) ways, 0.05 GB: flat ring 2*(3/4)*0.05/5 = 15 ms; hierarchical 2*(1/2)*0.05/100 = 0.5 ms
    # inside, then 2*(1/2)*0.025/2.5 = 10 ms across.
    topology = two_nodes()
    assert collective_s(topology, "all_reduce", 0.05e9, (2, 2)) == pytest.approx(10.5e-3, rel=0.01)


def test_span_places_an_axis_by_degree_and_stride() -> None:
    topology = parse_cluster("4x8xH100-SXM-80GB")
    assert topology.span(8, 1) == (8, 1)
    assert topology.span(4, 4) == (2, 2)
    assert topology.span(4, 8) == (1, 4)
    assert topology.span(32, 1) == (8, 4)
    degrees = Degrees(tp=4, cp=2, dp=4, pp=1, ep=4)
    assert topology.axis_span(degrees, "tp") == (4, 1)
    assert topology.axis_span(degrees, "cp") == (2, 1)
    assert topology.axis_span(degrees, "dp") == (1, 4)
    assert topology.axis_span(degrees, "dp_cp") == (2, 4)
    assert topology.axis_stride(degrees, "pp") == 32


@pytest.mark.parametrize("spec", CLUSTERS)
@pytest.mark.parametrize("kind", KINDS)
def test_cost_grows_with_bytes_and_is_zero_for_one_rank(spec: str, kind: str) -> None:
    topology = parse_cluster(spec)
    alone = tuple(1 for _ in topology.levels)
    assert collective_s(topology, kind, 1e9, alone) == 0.0
    ways = topology.span(topology.num_devices, 1)
    costs = [collective_s(topology, kind, size, ways) for size in (1e3, 1e5, 1e7, 1e9)]
    assert costs == sorted(costs) and len(set(costs)) == len(costs) and costs[0] > 0


@pytest.mark.parametrize("kind", ("all_gather", "reduce_scatter", "all_reduce"))
def test_cost_grows_with_ranks(kind: str) -> None:
    topology = parse_cluster("16x8xA100-SXM-80GB")
    costs = [
        collective_s(topology, kind, 64e6, topology.span(q, 1)) for q in (2, 4, 8, 16, 64, 128)
    ]
    assert costs == sorted(costs)


@pytest.mark.parametrize("spec", CLUSTERS)
def test_all_reduce_costs_at_least_a_reduce_scatter(spec: str) -> None:
    topology = parse_cluster(spec)
    degrees = [d for d in (2, 4, 8, 16, 32) if d <= topology.num_devices]
    for degree, size in itertools.product(degrees, (1e4, 1e6, 1e8, 1e10)):
        for stride in (1, topology.num_devices // degree):
            ways = topology.span(degree, stride)
            whole = collective_s(topology, "all_reduce", size, ways)
            assert whole >= collective_s(topology, "reduce_scatter", size, ways)


def test_groups_with_few_members_a_node_share_the_nics() -> None:
    # 8 ranks over 8 nodes, one a node: one GPU's share of the NICs; 64 over 8 nodes: all eight
    # shares.
    topology = parse_cluster("8x8xH100-SXM-80GB,nic=100Gb")
    thin = ring_s(topology, "all_gather", 1e9, (1, 8))
    wide = ring_s(topology, "all_gather", 1e9, (8, 8))
    assert thin > 6.0 * wide


def test_deduplicated_dispatch_crosses_each_link_once() -> None:
    # 2 nodes x 8, 2 copies a token: 1 copy leaves the node plainly, 2 * (1 - (1/2)^2) / 2
    # deduplicated.
    topology = parse_cluster("2x8xH100-SXM-80GB")
    plain = exchange_s(topology, 1e9, 2.0, (8, 2))
    once = exchange_s(topology, 1e9, 2.0, (8, 2), deduplicated=True)
    assert plain / once == pytest.approx(1.0 / 0.75, rel=0.01)


def test_sending_to_another_node_is_slower() -> None:
    topology = parse_cluster("2x8xA100-SXM-80GB")
    assert point_to_point_s(topology, 1e8, 8) > 5 * point_to_point_s(topology, 1e8, 1)


@pytest.mark.parametrize(
    ("spec", "size", "ways", "bus_gb_s"),
    [
        # Published nccl-tests figures (stas00/ml-engineering@744d01e18b network/README.md): 8 A100
        # 232, 8 H100 480 with NVLS, 8 B200 840; DGX A100 over nodes 192, DGX H100 over nodes 370.
        ("1x8xA100-SXM-80GB", 8e9, (8,), 232),
        ("1x8xH100-SXM-80GB", 8e9, (8,), 480),
        ("1x8xB200", 8e9, (8,), 840),
        ("4x8xA100-SXM-80GB", 8e9, (8, 4), 192),
        ("4x8xH100-SXM-80GB", 8e9, (8, 4), 370),
    ],
)
def test_large_all_reduces_reach_the_measured_bus_bandwidth(
    spec: str, size: float, ways: tuple[int, ...], bus_gb_s: float
) -> None:
    topology = parse_cluster(spec)
    ranks = topology.num_devices
    seconds = collective_s(topology, "all_reduce", size, ways)
    assert 2 * (ranks - 1) / ranks * size / seconds / 1e9 == pytest.approx(bus_gb_s, rel=0.05)

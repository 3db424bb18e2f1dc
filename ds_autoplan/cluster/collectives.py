r"""Seconds of collectives on a :class:`~ds_autoplan.cluster.topology.Topology`.

Notation: a group of q ranks spans q = q_0 * q_1 * ... ways over the levels; S is the full buffer
(of one rank, before a reduce-scatter or after an all-gather); B_l a level's bandwidth per device;
k_l = q_0 * ... * q_{l-1} the members below level l, whose links the group may use together:

    volume          phi(q) * S, phi = 2(q-1)/q all-reduce, (q-1)/q all-gather and reduce-scatter,
                    (q-1)/q all-to-all (S: what one rank holds)
    flat ring       phi(q) * S / min_l(k_l * B_l) + steps * a,    steps = q-1 (twice for all-reduce)
    tree            phi(q) * S / min_l(k_l * B_l) + 2 * ceil(log2 q_out) * a_tree + ring inside
    hierarchical    reduce-scatter inside, all-reduce of S/q_in across, all-gather inside
    all-to-all      per level, what leaves over it / its bandwidth; levels work at the same time

The minimum over the levels says that groups running at the same time share the NICs: a group with
one member a node gets one device's share, a group with all eight gets eight. An all-reduce is
never priced below a reduce-scatter of the same buffer.
"""

from __future__ import annotations

import math

from ds_autoplan.cluster.topology import Level, Topology

# NCCL's tree: growth of all-reduce latency per doubling of nodes. Fitted on the H100 scans of 4 to
# 1024 nodes (64 MB to 8 GB points; "alpha" 149, 225, 307, 464, 514, 633, 778 us);
# stas00/ml-engineering@744d01e18b network/images/nccl-all-reduce-scan-nvlstree.png and arXiv
# 2411.13055.
TREE_LATENCY_PER_HOP_S = 75e-6
# Start of a collective whatever its size: 22.2 to 25.6 us fixed (MooreThreads/SimuMax@4dcaae5
# configs/system/b200: network), 23 us fitted on 8 H100 (NVIDIA/dgxc-benchmarking@841f546
# nccl/README.md).
START_S = 22e-6
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def phi(kind: str, ranks: int) -> float:
    """Bytes that pass a rank's link, per byte of the full buffer."""
    if kind == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return (ranks - 1) / ranks


def volume_bytes(kind: str, buffer_bytes: float, ways: tuple[int, ...]) -> float:
    """Bytes that a volume-only cost counts, whatever the links."""
    return phi(kind, math.prod(ways)) * buffer_bytes


def level_bandwidth(level: Level, ways: int, below: int, kind: str = "") -> float:
    """Bandwidth that one group has at `level`, `ways` wide there, with `below` members under it."""
    per_device = level.bytes_per_s
    if kind == "all_reduce" and level.all_reduce_bytes_per_s and below == 1 and ways > 2:
        per_device = max(per_device, level.all_reduce_bytes_per_s)
    if kind == "all_to_all" and level.all_to_all_bytes_per_s:
        per_device = level.all_to_all_bytes_per_s
    if level.pair_bytes_per_s:
        per_device = min(per_device, level.pair_bytes_per_s * (ways - 1))
    return per_device * below


def ring_bandwidth(topology: Topology, ways: tuple[int, ...], kind: str = "") -> float:
    """Bandwidth of the slowest level that a ring over the group crosses."""
    slowest = math.inf
    below = 1
    alone = kind == "all_reduce" and sum(1 for count in ways if count > 1) == 1
    for level, count in zip(topology.levels, ways, strict=True):
        if count > 1:
            use = level_bandwidth(level, count, below, kind if alone else "")
            slowest = min(slowest, use)
        below *= count
    return slowest


def ring_s(topology: Topology, kind: str, buffer_bytes: float, ways: tuple[int, ...]) -> float:
    """A flat ring over all ranks of the group."""
    ranks = math.prod(ways)
    if ranks <= 1:
        return 0.0
    outer = max(index for index, count in enumerate(ways) if count > 1)
    hops = (ranks - 1) * (2 if kind == "all_reduce" else 1)
    across = math.prod(ways[1:]) if outer > 0 else ranks
    # Only the hops that leave the innermost level pay the outer latency.
    outer_hops = hops * across / ranks if outer > 0 else hops
    latency = outer_hops * topology.levels[outer].latency_s
    latency += (hops - outer_hops) * topology.levels[0].latency_s
    return phi(kind, ranks) * buffer_bytes / ring_bandwidth(topology, ways, kind) + latency


def hierarchical_all_reduce_s(
    topology: Topology, buffer_bytes: float, ways: tuple[int, ...]
) -> float:
    """Reduce-scatter inside, all-reduce across with 1/q_in of the buffer, all-gather inside."""
    total = 0.0
    shard = buffer_bytes
    below = 1
    outermost = max((i for i, count in enumerate(ways) if count > 1), default=0)
    for index, (level, count) in enumerate(zip(topology.levels, ways, strict=True)):
        if count == 1:
            continue
        bandwidth = level_bandwidth(level, count, 1)
        moved = 2.0 * (count - 1) / count * shard
        hops = 2 * (count - 1)
        total += moved / bandwidth + hops * level.latency_s
        if index != outermost:
            shard /= count
            below *= count
    return total


def tree_all_reduce_s(topology: Topology, buffer_bytes: float, ways: tuple[int, ...]) -> float:
    """A pipelined tree across the outer levels: ring bandwidth, logarithmic latency."""
    ranks = math.prod(ways)
    outer = math.prod(ways[1:])
    inside = 2 * (ways[0] - 1) * topology.levels[0].latency_s
    latency = inside + TREE_LATENCY_PER_HOP_S * math.log2(outer) if outer > 1 else inside
    bandwidth = ring_bandwidth(topology, ways, "all_reduce")
    return phi("all_reduce", ranks) * buffer_bytes / bandwidth + latency


def exchange_s(
    topology: Topology,
    token_bytes: float,
    copies: float,
    ways: tuple[int, ...],
    deduplicated: bool = False,
) -> float:
    """All-to-all in which every token goes to `copies` ranks of the group, evenly.

    Plain: each copy travels by itself. Deduplicated: over a link level between groups a token
        travels
    once per distinct group it visits, and is copied there; with n groups and k copies that is
    n * (1 - (1 - 1/n)^k) instead of k.
    """
    ranks = math.prod(ways)
    if ranks <= 1:
        return 0.0
    slowest, latency, below = 0.0, 0.0, 1
    for level, count in zip(topology.levels, ways, strict=True):
        if count > 1:
            groups = ranks // below
            sent = copies
            if below > 1 and deduplicated:
                sent = groups * (1.0 - (1.0 - 1.0 / groups) ** copies)
            leaving = sent * (groups - 1) / groups
            if below == 1:
                # Plain copies for other nodes leave over the outer links; deduplicated ones are
                # copied to their ranks inside the node they reach.
                leaving = copies * (count - 1) / (count if deduplicated else ranks)
            bandwidth = level_bandwidth(level, count, 1, "all_to_all")
            slowest = max(slowest, token_bytes * leaving / bandwidth)
            latency += (count - 1) * level.latency_s
        below *= count
    return slowest + latency


def all_to_all_s(topology: Topology, buffer_bytes: float, ways: tuple[int, ...]) -> float:
    """Every rank sends buffer/q to every other; each level carries what leaves over it."""
    return exchange_s(topology, buffer_bytes, 1.0, ways)


def collective_s(
    topology: Topology, kind: str, buffer_bytes: float, ways: tuple[int, ...]
) -> float:
    """The cheapest way to run a collective of `kind` over a group that spans `ways`.

    Args:
        topology: the cluster.
        kind: one of :data:`KINDS`.
        buffer_bytes: S, the full buffer of one rank.
        ways: the group's ways at each level, from :meth:`Topology.span`.
    """
    if math.prod(ways) <= 1 or buffer_bytes <= 0:
        return 0.0
    if kind == "all_to_all":
        return START_S + all_to_all_s(topology, buffer_bytes, ways)
    ring = ring_s(topology, kind, buffer_bytes, ways)
    if kind != "all_reduce":
        return START_S + ring
    cheapest = ring
    if math.prod(ways[1:]) > 1:
        cheapest = min(
            cheapest,
            tree_all_reduce_s(topology, buffer_bytes, ways),
            hierarchical_all_reduce_s(topology, buffer_bytes, ways),
        )
    # A switch that reduces must not make the sum cheaper than its own half.
    return START_S + max(cheapest, ring_s(topology, "reduce_scatter", buffer_bytes, ways))


def point_to_point_s(topology: Topology, bytes_: float, stride: int) -> float:
    """Send `bytes_` to the rank `stride` away, while all ranks do the same."""
    for level in topology.levels:
        if stride < level.size:
            bandwidth = level.pair_bytes_per_s or level.bytes_per_s
            return bytes_ / bandwidth + level.latency_s
    last = topology.levels[-1]
    return bytes_ / last.bytes_per_s + last.latency_s

"""The cluster a job runs on: GPUs by name, CPUs by a short measurement of all ranks."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from ds_autoplan.cluster import Topology, device_table, parse_cluster
from ds_autoplan.cluster.topology import Device, Level
from ds_autoplan.errors import BadInputError

# CPU measurement: matrix size and repetitions, and bytes of the timed all-reduces.
MATRIX, REPEATS = 384, 20
SMALL_BYTES, LARGE_BYTES, COPY_BYTES = 4 * 1024, 4 * 2**20, 32 * 2**20


def detect_cluster(spec: str) -> Topology:
    """The cluster named by `spec`, or the one this job runs on where it is "detect".

    Raises:
        BadInputError: the GPUs are of a kind that is not bundled, or `spec` is for another world.
    """
    world = dist.get_world_size()
    if spec != "detect":
        topology = parse_cluster(spec)
        if topology.num_devices != world:
            raise BadInputError(
                f'"cluster" is {spec!r} with {topology.num_devices} devices; {world} ranks run.',
                "A job is planned for the ranks that started.",
                'Remove "cluster", or start that many ranks.',
            )
        return topology
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if torch.cuda.is_available():
        return _gpus(world // per_node, per_node)
    return _cpus(world, per_node)


def _gpus(nodes: int, per_node: int) -> Topology:
    found = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    words = found.upper().replace("-", " ").split()
    best, score = "", 0.0
    for name, facts in device_table().items():
        parts = name.upper().split("-")
        if parts[0] not in words or facts["architecture"] == "cpu":
            continue
        points = 1.0 + sum(part in words for part in parts[1:])
        points -= abs(facts["memory_gib"] - memory) / memory
        if points > score:
            best, score = name, points
    if not best:
        raise BadInputError(
            f"The GPU {found!r} is not known.",
            "The planner needs its speed and links.",
            'Set "cluster" to a cluster JSON (see docs), or to the nearest of: '
            + ", ".join(device_table())
            + ".",
        )
    return parse_cluster(f"{nodes}x{per_node}x{best}")


def _cpus(world: int, per_node: int) -> Topology:
    """Measure what one process gets while all of them run, as they will in training."""
    dist.barrier()
    flops, copy = _matmul_flops(), _copy_bytes_per_s()
    latency, bandwidth = _all_reduce(world)
    values = torch.tensor([flops, copy, latency, bandwidth], dtype=torch.float64)
    dist.all_reduce(values)
    flops, copy, latency, bandwidth = (values / world).tolist()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    device = Device(
        name="CPU",
        architecture="cpu",
        multiprocessors=1,
        memory_bytes=memory,
        memory_bytes_per_s=copy,
        peak_flops={"fp32": flops, "bf16": flops, "fp16": flops},
        matmul_flops={"fp32": flops, "bf16": flops, "fp16": flops},
        source="measured when the job started",
    )
    levels = [Level("node", per_node, bandwidth, latency)]
    if world > per_node:
        levels.append(Level("cluster", world, bandwidth, latency))
    return Topology(
        device, tuple(levels), f"{world // per_node}x{per_node}xCPU (measured)", per_node, True
    )


def _matmul_flops() -> float:
    left, right = torch.randn(MATRIX, MATRIX), torch.randn(MATRIX, MATRIX)
    left @ right
    start = time.perf_counter()
    for _ in range(REPEATS):
        left @ right
    return REPEATS * 2 * MATRIX**3 / (time.perf_counter() - start)


def _copy_bytes_per_s() -> float:
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    start = time.perf_counter()
    for _ in range(4):
        target.copy_(source)
    return 4 * 2 * COPY_BYTES / (time.perf_counter() - start)


def _all_reduce(world: int) -> tuple[float, float]:
    """(seconds of one hop, bytes per second of one rank) from a small and a large all-reduce."""
    if world == 1:
        return 1e-5, 1e10
    times = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        buffer = torch.ones(size // 4)
        dist.all_reduce(buffer)
        start = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(buffer)
        times.append((time.perf_counter() - start) / 5)
    hops = 2 * (world - 1)
    latency = times[0] / hops
    moved = 2 * (world - 1) / world * LARGE_BYTES
    return latency, moved / max(times[1] - times[0], 1e-6)

"""What the ranks of a running process group measure of their devices and links.

All ranks measure at once, since training does: processes of one CPU share its memory, GPUs of one
node their NICs. A link's two numbers come from a small and a large all-reduce over a ring of n:

    small:  2 (n - 1) hops                 -> seconds of a hop
    large:  2 (n - 1) / n * bytes moved    -> bytes per second of one rank

Each time is the median of several, and the mean of these over all ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from ds_autoplan.cluster.presets import device_table, parse_cluster
from ds_autoplan.cluster.topology import Device, Level, Topology

# Matrix size, repetitions; bytes of the copies and of the small and the large all-reduce.
CPU_SIZES = {"matrix": 384, "repeats": 20, "copy": 32 * 2**20, "small": 4096, "large": 4 * 2**20}
GPU_SIZES = {"matrix": 8192, "repeats": 20, "copy": 2**30, "small": 4096, "large": 256 * 2**20}
ARCHITECTURES = {(7, 0): "volta", (7, 5): "turing", (8, 0): "ampere", (8, 6): "ampere"}
ARCHITECTURES.update({(8, 9): "ada", (9, 0): "hopper", (10, 0): "blackwell"})
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ALONE = (1e-5, 1e10)  # hop and bandwidth of a rank without others: used by nothing


def measured_cpus(world: int, per_node: int) -> Topology:
    """The CPUs of a job, from what one process gets while all of them run."""
    dist.barrier()
    rates, copy = _device_rates("cpu", CPU_SIZES)
    latency, bandwidth = _all_reduce(None, world, "cpu", CPU_SIZES)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    device = Device("CPU", "cpu", 1, memory, copy, rates, rates, "measured by all ranks at once")
    levels = [Level("node", per_node, bandwidth, latency)]
    if world > per_node:
        levels.append(Level("cluster", world, bandwidth, latency))
    name = f"{world // per_node}x{per_node}xCPU (measured)"
    return Topology(device, tuple(levels), name, per_node, True)


def measured_gpus(world: int, per_node: int) -> Topology:
    """The GPUs of a job: matmul and copy rates, links within and between nodes."""
    device = f"cuda:{torch.cuda.current_device()}"
    dist.barrier()
    matmul, copy = _device_rates(device, GPU_SIZES)
    group = _groups(world, per_node, across=False)
    hop, bandwidth = _all_reduce(group, per_node, device, GPU_SIZES)
    levels = [Level("node", per_node, bandwidth, hop)]
    nodes = world // per_node
    if nodes > 1:
        group = _groups(world, per_node, across=True)
        hop, bandwidth = _all_reduce(group, nodes, device, GPU_SIZES)
        levels.append(Level("cluster", world, bandwidth, hop))
    measured = _gpu(matmul, copy)
    name = f"{nodes}x{per_node}x{measured.name} (measured)"
    return Topology(measured, tuple(levels), name, per_node, True)


def known_gpu() -> str:
    """The bundled name of this process's GPU; empty where none is near."""
    words = torch.cuda.get_device_name().upper().replace("-", " ").split()
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    best, score = "", 0.0
    for name, facts in device_table().items():
        parts = name.upper().split("-")
        if parts[0] not in words or facts["architecture"] == "cpu":
            continue
        points = 1.0 + sum(part in words for part in parts[1:])
        points -= abs(facts["memory_gib"] - memory) / memory
        if points > score:
            best, score = name, points
    return best


def _gpu(matmul: dict[str, float], copy: float) -> Device:
    """The device with measured rates; the vendor's facts where it is a known one."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    name = known_gpu()
    if name:
        known = parse_cluster(f"1x1x{name}").device
        rates = {**known.matmul_flops, **matmul}
        return replace(known, matmul_flops=rates, memory_bytes_per_s=copy, source="measured")
    architecture = ARCHITECTURES.get((properties.major, properties.minor), "unknown")
    return Device(
        torch.cuda.get_device_name(),
        architecture,
        properties.multi_processor_count,
        properties.total_memory,
        copy,
        matmul,
        matmul,
        "measured; the peak is the measured rate",
    )


def _groups(world: int, per_node: int, across: bool) -> dist.ProcessGroup | None:
    """This rank's node, or the ranks with its place on every node."""
    own = None
    for index in range(per_node if across else world // per_node):
        ranks = (
            range(index, world, per_node)
            if across
            else range(index * per_node, (index + 1) * per_node)
        )
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    return own


def _device_rates(device: str, sizes: dict[str, int]) -> tuple[dict[str, float], float]:
    """(FLOP/s by precision, bytes per second of a copy), with all ranks at work."""
    n = sizes["matrix"]
    source = torch.ones(sizes["copy"] // 4, device=device)
    target = torch.empty_like(source)
    times = [_seconds(lambda: target.copy_(source), device, 5)]
    for dtype in DTYPES.values():
        left = torch.randn(n, n, device=device).to(dtype)
        right = torch.randn(n, n, device=device).to(dtype)
        times.append(_seconds(lambda a=left, b=right: a @ b, device, sizes["repeats"]))
    copy_s, *matmul_s = _means(times, device)
    rates = {name: 2.0 * n**3 / took for name, took in zip(DTYPES, matmul_s, strict=True)}
    return rates, 2.0 * sizes["copy"] / copy_s


def _all_reduce(
    group: dist.ProcessGroup | None, ranks: int, device: str, sizes: dict[str, int]
) -> tuple[float, float]:
    """(seconds of one hop, bytes per second of one rank)."""
    if ranks == 1:
        return ALONE
    times = []
    for size in (sizes["small"], sizes["large"]):
        buffer = torch.ones(size // 4, device=device)
        times.append(_seconds(lambda b=buffer: dist.all_reduce(b, group=group), device, 7))
    small, large = _means(times, device)
    # On a busy machine the small one may take as long as the large: half of that moved bytes.
    moved = 2.0 * (ranks - 1) / ranks * sizes["large"]
    return small / (2 * (ranks - 1)), moved / max(large - small, large / 2)


def _seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of `work` after one warm-up."""
    times = []
    for _ in range(1 + repeats):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _means(values: list[float], device: str) -> list[float]:
    """Means over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total / dist.get_world_size()]

"""What the ranks of a running process group measure of their devices and links.

All ranks measure at once, since training does: processes of one CPU share its memory, GPUs of one
node their NICs. A link's two numbers come from a small and a large all-reduce over a ring of n:

    small:  2 (n - 1) hops                 -> seconds of a hop
    large:  2 (n - 1) / n * bytes moved    -> bytes per second of one rank
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from ds_autoplan.cluster.presets import device_table, parse_cluster
from ds_autoplan.cluster.topology import Device, Level, Topology

# Matrix size, repetitions; bytes of the copies and of the small and the large all-reduce.
CPU_SIZES = {"matrix": 384, "repeats": 20, "copy": 32 * 2**20, "small": 4096, "large": 4 * 2**20}
GPU_SIZES = {"matrix": 8192, "repeats": 20, "copy": 2**30, "small": 4096, "large": 256 * 2**20}
ARCHITECTURES = {(7, 0): "volta", (7, 5): "turing", (8, 0): "ampere", (8, 6): "ampere"}
ARCHITECTURES.update({(8, 9): "ada", (9, 0): "hopper", (10, 0): "blackwell"})
ALONE = (1e-5, 1e10)  # hop and bandwidth of a rank without others: used by nothing


def measured_cpus(world: int, per_node: int) -> Topology:
    """The CPUs of a job, from what one process gets while all of them run."""
    dist.barrier()
    flops = _matmul_flops(torch.float32, "cpu", CPU_SIZES)
    copy = _copy_bytes_per_s("cpu", CPU_SIZES)
    latency, bandwidth = _all_reduce(None, world, "cpu", CPU_SIZES)
    flops, copy, latency, bandwidth = _means((flops, copy, latency, bandwidth), "cpu")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    rates = {"fp32": flops, "bf16": flops, "fp16": flops}
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
    rates = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    found = [_matmul_flops(dtype, device, GPU_SIZES) for dtype in rates.values()]
    found.append(_copy_bytes_per_s(device, GPU_SIZES))
    found += _all_reduce(_groups(world, per_node, across=False), per_node, device, GPU_SIZES)
    nodes = world // per_node
    if nodes > 1:
        found += _all_reduce(_groups(world, per_node, across=True), nodes, device, GPU_SIZES)
    means = _means(tuple(found), device)
    matmul = dict(zip(rates, means, strict=False))
    copy, hop, bandwidth = means[3:6]
    levels = [Level("node", per_node, bandwidth, hop)]
    if nodes > 1:
        hop, bandwidth = means[6:8]
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


def _matmul_flops(dtype: torch.dtype, device: str, sizes: dict[str, int]) -> float:
    n = sizes["matrix"]
    left = torch.randn(n, n, device=device).to(dtype)
    right = torch.randn(n, n, device=device).to(dtype)
    return 2.0 * n**3 / _seconds(lambda: left @ right, device, sizes["repeats"])


def _copy_bytes_per_s(device: str, sizes: dict[str, int]) -> float:
    source = torch.ones(sizes["copy"] // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * sizes["copy"] / _seconds(lambda: target.copy_(source), device, 4)


def _all_reduce(
    group: dist.ProcessGroup | None, ranks: int, device: str, sizes: dict[str, int]
) -> tuple[float, float]:
    """(seconds of one hop, bytes per second of one rank)."""
    if ranks == 1:
        return ALONE
    times = []
    for size in (sizes["small"], sizes["large"]):
        buffer = torch.ones(size // 4, device=device)
        times.append(_seconds(lambda b=buffer: dist.all_reduce(b, group=group), device, 5))
    moved = 2.0 * (ranks - 1) / ranks * sizes["large"]
    return times[0] / (2 * (ranks - 1)), moved / max(times[1] - times[0], 1e-6)


def _seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    """Mean seconds of `work` after one warm-up."""
    work()
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _means(values: tuple[float, ...], device: str) -> list[float]:
    """Means over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return [float(value) for value in total / dist.get_world_size()]

"""A process group made for a measurement: this machine's devices, or the launcher's ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ds_autoplan.integrations.calibration.measure import known_gpu, measured_cpus, measured_gpus

from ds_autoplan.cluster.presets import topology_to_json
from ds_autoplan.errors import AutoplanError, BadInputError

LIMIT_S = 300.0


def measure(processes: int) -> dict[str, Any] | None:
    """The cluster JSON of what was measured.

    Under a launcher (RANK and WORLD_SIZE in the environment) its ranks measure, and all but rank 0
    get None. Else `processes` processes of this machine are started, one a GPU where there are.

    Raises:
        BadInputError: a launcher's environment is there in part.
        AutoplanError: a process failed, or the measurement did not end in time.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_launcher()
        try:
            found = _take_part()
        except (RuntimeError, ValueError) as error:  # what torch.distributed raises
            last = str(error).strip().splitlines()[:1]
            raise AutoplanError(f"Rank {os.environ['RANK']} failed: {''.join(last)}") from error
        return found if os.environ["RANK"] == "0" else None
    answers: SimpleQueue[dict[str, Any]] = mp.get_context("spawn").SimpleQueue()
    _run(_work, processes, LIMIT_S, answers)
    return answers.get()


def exchange(processes: int, limit_s: float) -> None:
    """Let processes of this machine reduce a tensor on the CPU.

    Raises:
        AutoplanError: a process failed, or they did not end in time.
    """
    _run(_reduce, processes, limit_s, limit_s)


def _run(work: Callable[..., None], processes: int, limit_s: float, *given: object) -> None:
    """Run `work(rank, processes, port, *given)` in processes of their own."""
    context = mp.spawn(work, (processes, _free_port(), *given), processes, join=False)
    end = time.monotonic() + limit_s
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > end:
                raise AutoplanError(
                    f"{processes} processes that exchange tensors did not end in {limit_s:.0f} s.",
                    "On an idle machine that takes seconds.",
                    "Look for other load, or for a firewall on the loopback interface.",
                )
    except (mp.ProcessExitedException, mp.ProcessRaisedException) as error:
        last = str(error).strip().splitlines()[-1]
        raise AutoplanError(f"A process that exchanges tensors failed: {last}") from error
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def local_gpus() -> str:
    """This machine's GPUs as a cluster spec; empty without GPUs, or where their kind is unknown."""
    if not torch.cuda.is_available():
        return ""
    name = known_gpu()
    return f"1x{torch.cuda.device_count()}x{name}" if name else ""


def local_processes() -> int:
    """One a GPU; without GPUs one a core, eight at most."""
    return torch.cuda.device_count() or max(1, min(8, os.cpu_count() or 1))


def _work(rank: int, world: int, port: int, answers: SimpleQueue[dict[str, Any]]) -> None:
    _enter(rank, world, port)
    found = _take_part()
    if rank == 0:
        answers.put(found)


def _reduce(rank: int, world: int, port: int, limit_s: float) -> None:
    _enter(rank, world, port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit_s))
    try:
        value = torch.ones(1)
        dist.all_reduce(value)
        if value.item() != world:
            raise AutoplanError(f"{world} ones add up to {value.item()}.")
    finally:
        dist.destroy_process_group()


def _enter(rank: int, world: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )


def _check_launcher() -> None:
    """See that the launcher's variables are whole: torch waits for minutes where they are not."""
    for name, least in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0), ("MASTER_PORT", 1)):
        value = os.environ.get(name, "0" if name == "LOCAL_RANK" else "")
        if not value.isascii() or not value.isdigit() or int(value) < least:
            raise BadInputError(
                f"{name} is {value!r} in the environment, where RANK and WORLD_SIZE are set.",
                f"A launcher sets it to a whole number from {least}.",
                "Start this with a launcher, or unset RANK and WORLD_SIZE.",
            )
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        raise BadInputError(
            f"RANK is {os.environ['RANK']} of WORLD_SIZE {os.environ['WORLD_SIZE']}.",
            "Ranks count from 0 to below the world size.",
        )
    if not os.environ.get("MASTER_ADDR"):
        raise BadInputError(
            "MASTER_ADDR is not set, where RANK and WORLD_SIZE are.",
            "A launcher sets all.",
            "Start this with a launcher, or unset RANK and WORLD_SIZE.",
        )


def _take_part() -> dict[str, Any]:
    world = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    gpus = torch.cuda.is_available()
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(1)
    backend = "nccl" if gpus else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=LIMIT_S))
    try:
        topology = measured_gpus(world, per_node) if gpus else measured_cpus(world, per_node)
    finally:
        dist.destroy_process_group()
    return topology_to_json(topology)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])

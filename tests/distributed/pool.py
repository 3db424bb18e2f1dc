"""Four processes that stay up and run functions together, as the ranks of one job.

Starting four processes that import torch and DeepSpeed takes ten seconds and more, a tiny training
run one. So tests send functions to processes that are started once. A function is named
"module:function"; each rank calls it with the same arguments, and `Pool.run` returns what the ranks
returned, in their order.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
START_S, CALL_S, AFTER_AN_ERROR_S = 400.0, 180.0, 20.0
# Each case makes some 25 process groups that live as long as the process, and gloo's thread of each
# wakes a hundred times a second: fresh forks are cheaper than a thousand such threads.
CALLS_PER_START = 6


IMPORTED_ONCE = [
    "torch",
    "deepspeed",
    "accelerate",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "megatron.core.tensor_parallel",
]

# A user's DeepSpeed JSON, small.
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.5,
    "steps_per_print": 1000000,
}


class RanksFailed(AssertionError):
    """What was raised, by rank; `errors` holds (type name, message, traceback) or None."""

    def __init__(self, errors: list[tuple[str, str, str] | None]) -> None:
        self.errors = errors
        first = next(item for item in errors if item is not None)
        failed = [rank for rank, item in enumerate(errors) if item is not None]
        super().__init__(f"ranks {failed} failed; the first:\n{first[2]}")


class Pool:
    """Processes of one gloo job; started at the first call, and again after one hung."""

    def __init__(self, world: int = 4) -> None:
        self.world = world
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        self.stacks: list[Path] = []
        self.calls = 0
        atexit.register(self.close)
        self.folder = tempfile.TemporaryDirectory(prefix="ds_autoplan_pool_")

    def run(self, function: str, *args: Any, timeout_s: float = CALL_S, **kwargs: Any) -> list[Any]:
        """Call a function on every rank; RanksFailed if any raised, TimeoutError if any hung."""
        if self.calls == CALLS_PER_START:
            self.close()
        if not self.processes:
            self._start()
        self.calls += 1
        for pipe in self.pipes:
            pipe.send((function, args, kwargs))
        answers = self._collect(timeout_s, function)
        errors = [error for error, _ in answers]
        if any(errors):
            raise RanksFailed(errors)
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.processes, self.pipes, self.stacks, self.calls = [], [], [], 0

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        # Imports take most of the start: one process does them, and the ranks are its forks.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            stacks = Path(self.folder.name) / f"stacks_{rank}"
            process = context.Process(
                target=_work, args=(rank, self.world, port, theirs, str(stacks))
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
            self.stacks.append(stacks)
        self._collect(START_S, "starting")

    def _collect(self, timeout_s: float, what: str) -> list[Any]:
        end = time.monotonic() + timeout_s
        answers: dict[int, Any] = {}
        rank_of = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while len(answers) < self.world:
            waiting = [pipe for pipe, rank in rank_of.items() if rank not in answers]
            ready = multiprocessing.connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                self._give_up(what, answers, timeout_s)
            for pipe in ready:
                rank = rank_of[pipe]
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, OSError):
                    self.close()
                    raise AssertionError(f"{what}: rank {rank} died") from None
                if answers[rank][0] is not None:
                    # The others wait for it, or fail as well.
                    end = min(end, time.monotonic() + AFTER_AN_ERROR_S)
        return [answers[rank] for rank in range(self.world)]

    def _give_up(self, what: str, answers: dict[int, Any], timeout_s: float) -> None:
        silent = [rank for rank in range(self.world) if rank not in answers]
        report = self._stacks_of_all()
        self.close()
        errors = [answers.get(rank, (None, None))[0] for rank in range(self.world)]
        if any(errors):
            raise RanksFailed(errors)
        raise TimeoutError(f"{what}: ranks {silent} gave no answer in {timeout_s} s\n{report}")

    def _stacks_of_all(self) -> str:
        for process in self.processes:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(
            f"--- rank {rank}\n{path.read_text()}" for rank, path in enumerate(self.stacks)
        )


def _work(rank: int, world: int, port: int, pipe: Any, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            OMP_NUM_THREADS="1",
        )
        sys.path.insert(0, str(ROOT))
        # A script's data loaders fork their workers.
        multiprocessing.set_start_method("fork", force=True)
        _prepare()
        pipe.send((None, None))
        while True:
            try:
                name, args, kwargs = pipe.recv()
            except EOFError:
                os._exit(0)
            pipe.send(_call(name, args, kwargs))


def _prepare() -> None:
    import torch

    import ds_autoplan  # noqa: F401  (its hook, where it is not installed)

    torch.set_num_threads(1)
    import logging

    import deepspeed

    # The command line's launcher compiles nothing either: launch.py turns this operator off.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    logging.getLogger("ds_autoplan").setLevel(logging.ERROR)


def _call(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    module, function = name.split(":")
    try:
        return None, getattr(importlib.import_module(module), function)(*args, **kwargs)
    except Exception as error:
        return (type(error).__name__, str(error), traceback.format_exc()), None
    finally:
        forget_job()


def forget_job() -> None:
    """What the end of a process would do: the next function is another job, planned or not."""
    import torch
    from deepspeed.utils import groups

    groups.mpu = None
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._reset_state()
    gc.collect()
    torch.manual_seed(0)

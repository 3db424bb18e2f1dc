"""The pool's processes: `python -m ds_autoplan.integrations.verification.worker FD [preload]`.

This starts the *starter*. It imports once what every rank needs (most of a process's start) and
forks a process for each role it is asked for. With GPUs it imports nothing (`preload` absent): CUDA
does not survive a fork.

A forked process answers requests until its connection closes. Its role is a rank, or "referee".
SIGUSR1 writes the stacks of its threads to its log, which is how the pool explains a hang.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from ds_autoplan.errors import AutoplanError

Answer = Callable[[dict[str, Any]], dict[str, Any]]

TRAINING = ("torch", "transformers.generation.utils", "transformers.masking_utils")
# The referee is forked before these are imported: the reference knows nothing of them.
PLANNED = ("deepspeed", "ds_autoplan.integrations.deepspeed.launch")


def main(descriptor: int, preload: bool) -> None:
    """Fork a process for each (role, log) that is asked for, until the pool is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps them
    channel = Connection(descriptor)
    while True:
        try:
            role, log = channel.recv()
            handle = recv_handle(channel)
        except EOFError:
            os._exit(0)
        if preload:
            load(role)
        pid = os.fork()
        if pid == 0:
            channel.close()
            serve(Connection(handle), role, log)
        os.close(handle)
        channel.send(pid)


def load(role: str) -> None:
    """Import what a role needs."""
    for name in TRAINING if role == "referee" else TRAINING + PLANNED:
        importlib.import_module(name)


def serve(channel: Connection, role: str, log: str) -> None:
    """Answer requests until the other side is gone; ends the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    try:
        answer = _role(role)
        channel.send({"value": {"ready": True}})
        while True:
            channel.send(_answered(answer, channel.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # at once: threads of a half-ended case must not keep the process
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _role(role: str) -> Answer:
    load(role)
    import torch

    torch.set_num_threads(1)
    if role == "referee":
        from ds_autoplan.integrations.verification.reference import Referee

        return Referee()
    from ds_autoplan.integrations.verification.planned import Rank

    return Rank(int(role))


def _answered(answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": answer(request)}
    except AutoplanError as error:
        return {"error": str(error), "trace": ""}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


if __name__ == "__main__":
    main(int(sys.argv[1]), "preload" in sys.argv[2:])

"""Failing together: an error of one rank ends all of them, with one readable message on rank 0."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ds_autoplan.errors import AutoplanError

# How long other ranks wait before they exit, so that rank 0's message is out before a launcher
# ends it.
GRACE_S = 2.0

_previous_hook: Any = None


def report_on_rank_0() -> None:
    """Show an uncaught AutoplanError as one message on rank 0, without a traceback on any."""
    global _previous_hook
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not issubclass(kind, AutoplanError):
        _previous_hook(kind, error, traceback)
        return
    rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    if rank == 0:
        sys.stderr.write(f"\nds_autoplan: error: {error}\n")
        sys.stderr.flush()
    else:
        time.sleep(GRACE_S)


@contextmanager
def fail_together() -> Iterator[None]:
    """Run a block on all ranks; if it raises an AutoplanError on any, raise one on every rank."""
    mine: AutoplanError | None = None
    try:
        yield
    except AutoplanError as error:
        mine = error
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, None if mine is None else (type(mine), mine.args[0]))
    first = next(((rank, item) for rank, item in enumerate(errors) if item is not None), None)
    if first is None:
        return
    rank, (kind, message) = first
    if mine is not None and rank == dist.get_rank():
        raise mine
    raise kind(message if rank == 0 else f"rank {rank}: {message}")

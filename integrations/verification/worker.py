"""A process of the pool: `python -m ds_autoplan.integrations.verification.worker FD ROLE`.

It answers requests that come over the connection FD, until that closes. ROLE is a rank, or "referee".
SIGUSR1 writes the stacks of all threads to standard error, which is how the pool explains a hang.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ds_autoplan.errors import AutoplanError

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def main(descriptor: int, role: str) -> None:
    """Serve requests until the other side is gone."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    channel = Connection(descriptor)
    answer = _role(role)
    channel.send({"ready": True})
    while True:
        try:
            request = channel.recv()
        except EOFError:
            # Threads of a half-ended case must not keep the process.
            os._exit(0)
        channel.send(_answered(answer, request))


def _role(role: str) -> Answer:
    import torch

    torch.set_num_threads(1)
    if role == "referee":
        from ds_autoplan.integrations.verification.reference import Referee

        return Referee()
    import deepspeed  # noqa: F401  (a script imports it first; the hook wraps `initialize`)
    from ds_autoplan.integrations.verification.planned import Rank

    import ds_autoplan  # noqa: F401  (the hook, also where no .pth file is installed)

    return Rank(int(role))


def _answered(answer: Answer, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": answer(request)}
    except AutoplanError as error:
        return {"error": str(error), "trace": ""}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""Processes that stay up over many cases: one per rank, and a referee for the reference.

Importing torch, transformers and DeepSpeed takes many times longer than a tiny case: one process
does it and forks the others (see worker.py). There are as many ranks as the largest case so far
needed; smaller cases use the first ones. A case that raises on all ranks is an answer like any
other. A case that does not end in time is ended with a dump of every thread's stack, and the next
case gets new processes. On CPUs the ranks are forked anew every so many cases: gloo keeps a few
threads of every process group it ever had, and each wakes a hundred times a second. No torch here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path
from types import TracebackType
from typing import Any

import ds_autoplan

START_S = 600.0
# Cases after which the ranks are forked anew (some four threads stay of each case).
FRESH_AFTER = 16
# After one rank raised, how long the others get to raise too.
GRACE_S = 30.0
# How long a process gets to write its stacks.
DUMP_S = 3.0
REFEREE = -1


class CaseFailed(Exception):
    """A case that raised or hung. `details` holds a traceback or the stacks."""

    def __init__(self, message: str, details: str = "") -> None:
        """Keep the message and the details."""
        super().__init__(message)
        self.details = details


@dataclass
class Member:
    """One process: its name in messages, its id, its connection and what it writes."""

    name: str
    pid: int
    channel: Connection
    log: Path


class Pool:
    """The processes. Use it in a `with` statement."""

    def __init__(self, use_gpus: bool) -> None:
        """Start nothing yet.

        Args:
            use_gpus: whether the ranks may see GPUs (there is one for each), or run on the CPU.
        """
        self.use_gpus = use_gpus
        self.members: dict[int, Member] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="ds_autoplan_verify_"))
        self.starter: tuple[subprocess.Popen[bytes], Connection] | None = None
        self.started = self.cases = 0

    def next_case(self) -> int:
        """The number of the case that begins, which may be one for fresh ranks."""
        if self.cases and self.cases % FRESH_AFTER == 0 and not self.use_gpus:
            self.end([key for key in self.members if key != REFEREE])
        self.cases += 1
        return self.cases

    def __enter__(self) -> Pool:
        """The pool itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End all processes and remove their files."""
        self.end()
        if self.starter is not None:
            process, channel = self.starter
            channel.close()
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask(self, requests: dict[int, dict[str, Any]], limit_s: float) -> dict[int, dict[str, Any]]:
        """Send one request to each of some members and return their answers.

        Raises:
            CaseFailed: a member raised, ended, or did not answer within `limit_s` seconds.
        """
        self._start(list(requests))
        for key, request in requests.items():
            self.members[key].channel.send(request)
        answers = self._collect(list(requests), limit_s)
        failed = [key for key, answer in answers.items() if "error" in answer]
        if failed:
            first = answers[failed[0]]
            asked = [key for key in requests if key != REFEREE]
            where = "" if set(failed) == set(asked) else f"{self.members[failed[0]].name}: "
            raise CaseFailed(where + first["error"], first["trace"])
        return {key: answer["value"] for key, answer in answers.items()}

    # Starting and ending

    def _start(self, keys: list[int]) -> None:
        new = sorted(key for key in keys if key not in self.members)
        for key in new:  # the referee first: see the starter
            self.members[key] = self._member(key)
        if new:
            self._collect(new, START_S)

    def _member(self, key: int) -> Member:
        name = "referee" if key == REFEREE else f"rank {key}"
        self.started += 1
        log = self.folder / f"{name.replace(' ', '_')}_{self.started}.log"
        log.touch()
        process, starter = self.starter = self.starter or self._starter()
        ours, theirs = Pipe()
        starter.send((name.removeprefix("rank "), str(log)))
        send_handle(starter, theirs.fileno(), process.pid)
        theirs.close()
        if not starter.poll(START_S):
            raise CaseFailed(f"No process was started within {START_S:.0f} s.")
        try:
            pid = starter.recv()
        except EOFError:
            self.starter = None
            text = (self.folder / "starter.log").read_text(errors="replace")
            raise CaseFailed("The processes cannot be started.", text[-4000:]) from None
        return Member(name, pid, ours, log)

    def _starter(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        command = [sys.executable, "-m", "ds_autoplan.integrations.verification.worker"]
        with (self.folder / "starter.log").open("wb") as output:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), *([] if self.use_gpus else ["preload"])],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=self._environment(),
            )
        theirs.close()
        return process, ours

    def _environment(self) -> dict[str, str]:
        """The caller's, with one thread per process and this package on the path."""
        root = str(Path(ds_autoplan.__file__).resolve().parent.parent)
        path = os.pathsep.join(item for item in (root, os.environ.get("PYTHONPATH", "")) if item)
        changed = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        if not self.use_gpus:
            changed |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        return {**os.environ, **changed}

    def end(self, keys: list[int] | None = None) -> None:
        """End members (all, unless `keys` names some) at once; the starter stays."""
        for key in list(self.members) if keys is None else keys:
            member = self.members.pop(key)
            member.channel.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)

    # Answers

    def _collect(self, keys: list[int], limit_s: float) -> dict[int, dict[str, Any]]:
        """One answer of each member; what does not come in time ends all ranks."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        shortened = False
        while len(answers) < len(keys):
            waiting = {self.members[key].channel: key for key in keys if key not in answers}
            left = deadline - time.monotonic()
            ready = wait(list(waiting), timeout=max(0.0, left))
            if not ready:
                raise self._hang(list(waiting.values()), answers, limit_s)
            for channel in ready:
                key = waiting[channel]  # type: ignore[index]
                try:
                    answers[key] = channel.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    raise self._death(key) from None
            if not shortened and any("error" in answer for answer in answers.values()):
                shortened = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _hang(
        self, silent: list[int], answers: dict[int, dict[str, Any]], limit_s: float
    ) -> CaseFailed:
        names = ", ".join(self.members[key].name for key in silent)
        message = f"{names} did not answer within {limit_s:.0f} s."
        trace = ""
        for key, answer in answers.items():
            if "error" in answer:
                message = f"{self.members[key].name}: {answer['error']} ({names} went on.)"
                trace = answer["trace"]
                break
        details = trace + "\n".join(self._stacks(key) for key in silent)
        self.end()
        return CaseFailed(message, details)

    def _stacks(self, key: int) -> str:
        """What a silent member is doing: the stacks of its threads."""
        member = self.members[key]
        before = member.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGUSR1)
        end = time.monotonic() + DUMP_S
        text = ""
        while time.monotonic() < end:
            time.sleep(0.1)
            grown = member.log.read_bytes()[before:].decode(errors="replace")
            if grown and grown == text:
                break
            text = grown
        return f"--- {member.name}\n{text}"

    def _death(self, key: int) -> CaseFailed:
        member = self.members[key]
        tail = member.log.read_text(errors="replace")[-4000:]
        self.end()
        return CaseFailed(f"{member.name} ended.", tail)

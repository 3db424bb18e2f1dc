"""Options that several commands share: the job, and how results are shown."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ds_autoplan.errors import BadInputError
from ds_autoplan.reading import MALFORMED
from ds_autoplan.workload import BACKENDS, PRECISIONS, Workload

if TYPE_CHECKING:
    from ds_autoplan.cluster import Topology
    from ds_autoplan.search.solve import Progress

OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "adafactor")


def add_job(parser: argparse.ArgumentParser) -> None:
    """--model, --cluster, --seq-length, --global-batch-size and the rest of the workload."""
    parser.add_argument(
        "--model", required=True, metavar="M", help="config.json, model folder, or bundled name"
    )
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="C",
        help="NODESxGPUSxNAME, as 4x8xH100-SXM-80GB (optionally ,nic=400Gb), a cluster JSON, or "
        "detect: this machine",
    )
    parser.add_argument(
        "--seq-length", type=positive, required=True, metavar="S", help="tokens of a sequence"
    )
    parser.add_argument(
        "--global-batch-size",
        type=positive,
        required=True,
        metavar="B",
        help="sequences of an optimizer step",
    )
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="bf16", help="of training (default: bf16)"
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="its states (default: adamw)"
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="deepspeed",
        help="what runs the plan: this plugin on DeepSpeed (default), or Megatron by export",
    )
    parser.add_argument(
        "--gradient-accumulation-steps",
        type=positive,
        metavar="A",
        help="engine calls per step that the script makes (deepspeed backend)",
    )
    parser.add_argument("--gradient-clipping", type=float, default=0.0, metavar="NORM")


def cluster_of(spec: str) -> Topology:
    """The cluster that `spec` names; "detect": this machine's GPUs by name, else measured.

    Raises:
        BadInputError: `spec` is not a cluster.
    """
    from ds_autoplan.cluster import parse_cluster

    if spec != "detect":
        return parse_cluster(spec)
    from ds_autoplan.cluster.presets import topology_from_json
    from ds_autoplan.integrations.calibration.local import local_gpus, local_processes, measure

    name = local_gpus()
    if name:
        return parse_cluster(name)
    if "RANK" in os.environ:
        raise BadInputError(
            "This cluster has to be measured, which a launcher's ranks do together.",
            "",
            "Run `ds-autoplan calibrate --out cluster.json` under the launcher, and name its file.",
        )
    processes = local_processes()
    print(f"measuring this machine with {processes} processes", file=sys.stderr)
    measured = measure(processes)
    assert measured is not None, "no launcher started this command"
    return topology_from_json(measured)


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload that :func:`add_job`'s options describe."""
    return Workload(
        seq_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        precision=args.precision,
        optimizer=args.optimizer,
        backend=args.backend,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_clipping=args.gradient_clipping,
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json: nothing but JSON on standard output."""
    parser.add_argument("--json", action="store_true", help="print JSON only")


def positive(text: str) -> int:
    """An argparse type: a positive integer."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def positive_list(text: str) -> tuple[int, ...]:
    """An argparse type: positive integers with commas between."""
    return tuple(positive(part) for part in text.split(","))


def terminal_progress() -> Progress | None:
    """A progress line on standard error after two seconds, if that is a terminal."""
    if not sys.stderr.isatty():
        return None
    started = time.monotonic()
    state = {"shown": False}

    def show(done: int, total: int, best_s: float | None) -> None:
        if time.monotonic() - started > 2:
            best = f", best step {best_s:.4g} s" if best_s is not None else ""
            print(f"\r{done} of {total} candidates{best} ", end="", file=sys.stderr, flush=True)
            state["shown"] = True
        if done == total and state["shown"]:
            print(file=sys.stderr)

    return show


@contextmanager
def as_written(path: str) -> Iterator[None]:
    """What a plan file says beside its decision is not checked when it is read; here it is used.

    Raises:
        BadInputError: it is not what `ds-autoplan plan` writes.
    """
    try:
        yield
    except MALFORMED as error:
        raise BadInputError(
            f"What the plan file {path!r} reports cannot be used: {type(error).__name__}: {error}.",
            "A plan file is what `ds-autoplan plan --out` wrote.",
            "Make it again.",
        ) from error

"""`ds-autoplan calibrate`."""

from __future__ import annotations

import argparse
import json
import sys

from ds_autoplan.cli.jobs import add_json, positive
from ds_autoplan.writing import check_writable, write_whole

EPILOG = """examples:
  ds-autoplan calibrate --out cluster.json
  ds-autoplan calibrate --processes 4 --out cluster.json
  deepspeed --hostfile hosts --no_local_rank --module ds_autoplan calibrate --out cluster.json

Measures matrix products, copies and all-reduces with all devices at work: this machine's GPUs, one
process each, or its CPU cores. Started by a launcher it measures the launcher's ranks, and so the
network between nodes. The file is a cluster for `plan --cluster` and for the "cluster" of a job."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("--out", metavar="CLUSTER.json", help="write the cluster there")
    parser.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="processes on this machine (default: one a GPU; without GPUs one a core, at most 8)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print or write the cluster."""
    from ds_autoplan.integrations.calibration.local import local_processes, measure

    if args.out:
        check_writable(args.out)
    processes = args.processes or local_processes()
    if sys.stderr.isatty():
        print(f"measuring with {processes} processes ...", file=sys.stderr)
    cluster = measure(processes)
    if cluster is None:
        return 0
    text = json.dumps(cluster, indent=1)
    if args.out:
        write_whole(args.out, text + "\n")
    if args.json:
        print(json.dumps(cluster))
    elif args.out:
        print(f"{_line(cluster)}\nWritten to {args.out}")
    else:
        print(text)
    return 0


def _line(cluster: dict[str, object]) -> str:
    device, levels = cluster["device"], cluster["levels"]
    assert isinstance(device, dict) and isinstance(levels, list)
    rates = ", ".join(f"{key} {rate:.3g}" for key, rate in device["matmul_tflops"].items())
    links = ", ".join(
        f"{level['name']} of {level['size']}: {level['gb_per_s']:.3g} GB/s, "
        f"{level['latency_us']:.3g} us a hop"
        for level in levels
    )
    memory = f"memory {1e3 * device['memory_tb_s']:.3g} GB/s"
    return f"{cluster['name']}: TFLOP/s {rates}; {memory}; {links}"

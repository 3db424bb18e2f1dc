"""`ds-autoplan plan`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ds_autoplan.cli.jobs import (
    add_job,
    add_json,
    cluster_of,
    positive_list,
    terminal_progress,
    workload_of,
)
from ds_autoplan.errors import BadInputError
from ds_autoplan.search.options import PlanOptions, parse_pins

EPILOG = """example:
  ds-autoplan plan --model llama-3-70b --cluster 8x8xH100-SXM-80GB --seq-length 8192 \\
      --global-batch-size 512 --pin pp=1,2,4 --out plan.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    add_job(parser)
    parser.add_argument(
        "--micro-batch-size", type=positive_list, metavar="N[,N..]", help="allowed sizes"
    )
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME=V[,V..]",
        help="allowed values of a degree: tp, pp, dp, cp, ep, vpp, zero_stage, micro_batch_size, "
        "sequence_parallel, activation_checkpointing, attention, mlp, vocabulary, order "
        "(repeatable)",
    )
    parser.add_argument("--no-pipeline", action="store_true", help="keep pp at 1")
    parser.add_argument("--no-tensor-parallel", action="store_true", help="keep tp at 1")
    parser.add_argument(
        "--memory-reserve-gb", type=float, metavar="GB", help="memory of a device to leave free"
    )
    parser.add_argument("--top", type=int, default=3, metavar="K", help="runners-up to report (3)")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="of the search (default: none)"
    )
    parser.add_argument(
        "--cost",
        choices=("topology", "volume"),
        default="topology",
        help="price traffic by links (default), or by volume alone",
    )
    parser.add_argument(
        "--schedule",
        choices=("1f1b", "gpipe"),
        default="1f1b",
        help="pipeline schedule to price (default: 1f1b)",
    )
    parser.add_argument(
        "--ablation",
        choices=("inter", "intra"),
        default="",
        help="search pipeline stages only, or layers' sharding only (for comparison)",
    )
    parser.add_argument("--prove", action="store_true", help="solve the winner's ILP with HiGHS")
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan")
    add_json(parser)


def options_of(args: argparse.Namespace) -> PlanOptions:
    """The planner's options from the command line."""
    pins: dict[str, Any] = parse_pins(args.pin)
    if args.micro_batch_size:
        if "micro_batch_size" in pins:
            raise BadInputError(
                "micro_batch_size is given by --micro-batch-size and by --pin.", "Give it once."
            )
        pins["micro_batch_size"] = args.micro_batch_size
    if args.top < 0:
        raise BadInputError(f"--top is {args.top}.", "It must not be negative.")
    return PlanOptions(
        pins=pins,
        pipeline=not args.no_pipeline,
        tensor_parallel=not args.no_tensor_parallel,
        memory_reserve_gb=args.memory_reserve_gb,
        time_limit_s=args.time_limit,
        top_k=args.top,
        cost=args.cost,
        schedule=args.schedule,
        ablation=args.ablation,
        prove=args.prove,
    )


def run(args: argparse.Namespace) -> int:
    """Plan, write, print."""
    from ds_autoplan.api import plan

    made = plan(
        args.model,
        cluster_of(args.cluster),
        workload_of(args),
        options_of(args),
        progress=terminal_progress(),
    )
    if args.out:
        made.save(args.out)
    if args.json:
        print(json.dumps(made.to_json()))
    else:
        from ds_autoplan.cli.table import plan_text

        print(plan_text(made))
        if args.out:
            print(f"Written to {args.out}")
    return 0

"""`ds-autoplan report`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ds_autoplan.cli.jobs import add_json, as_written
from ds_autoplan.errors import BadInputError
from ds_autoplan.plan import Plan
from ds_autoplan.writing import write_whole

EPILOG = """examples:
  ds-autoplan report plan.json --out report.html
  ds-autoplan report plan.json --runs runs.jsonl --out report.html

The page needs no other file and no network."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--out", required=True, metavar="FILE.html")
    parser.add_argument(
        "--runs", metavar="RUNS.jsonl", help="measured runs to show beside the prediction"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    from ds_autoplan.report import render

    plan = Plan.load(args.plan)
    inputs = [name for name in (args.plan, args.runs) if name]
    if any(Path(name).resolve() == Path(args.out).resolve() for name in inputs):
        raise BadInputError(
            f"The page would replace {args.out!r}, which is read.", "", "Name another --out."
        )
    measured = []
    if args.runs:
        from ds_autoplan.runs import load_runs
        from ds_autoplan.validate import price_run

        measured = [price_run(item) for item in load_runs(args.runs)]
    with as_written(args.plan):
        text = render(plan, measured)
    write_whole(args.out, text)
    answer = {"out": args.out, "bytes": len(text.encode()), "fingerprint": plan.fingerprint}
    print(json.dumps(answer) if args.json else f"Written to {args.out}")
    return 0

"""`ds-autoplan report`."""

from __future__ import annotations

import argparse
import json

from ds_autoplan.cli.jobs import add_json, write_text
from ds_autoplan.plan import Plan

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
    measured = []
    if args.runs:
        from ds_autoplan.runs import load_runs
        from ds_autoplan.validate import price_run

        measured = [price_run(item) for item in load_runs(args.runs)]
    text = render(plan, measured)
    write_text(args.out, text)
    answer = {"out": args.out, "bytes": len(text.encode()), "fingerprint": plan.fingerprint}
    print(json.dumps(answer) if args.json else f"Written to {args.out}")
    return 0

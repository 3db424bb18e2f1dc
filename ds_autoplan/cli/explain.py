"""`ds-autoplan explain`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ds_autoplan.cli.jobs import add_json, as_written
from ds_autoplan.plan import Plan
from ds_autoplan.search.options import parse_pins

EPILOG = """example:
  ds-autoplan explain plan.json
  ds-autoplan explain plan.json --why-not tp=8,pp=2"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument(
        "--why-not",
        metavar="NAME=V,..",
        help="price the best plan with these degrees and say where it loses, or what excludes it",
    )
    parser.add_argument("--excluded", action="store_true", help="list all exclusions, too")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show the plan, or answer the question."""
    with as_written(args.plan):
        return _show(Plan.load(args.plan), args)


def _show(plan: Plan, args: argparse.Namespace) -> int:
    if args.why_not:
        from ds_autoplan.explain import why_not

        answer = why_not(plan, parse_pins([args.why_not]))
        print(json.dumps(answer) if args.json else _answer_text(plan, answer))
        return 0
    if args.json:
        from ds_autoplan.explain import layer_groups

        print(json.dumps({**plan.to_json(), "layer_groups": layer_groups(plan)}))
        return 0
    from ds_autoplan.cli.table import plan_text, table

    print(plan_text(plan))
    if plan.excluded:
        shown = plan.excluded if args.excluded else plan.excluded[:10]
        rows = [
            [" ".join(f"{key}={value}" for key, value in item["candidate"].items()), item["reason"]]
            for item in shown
        ]
        print()
        print(table(["excluded", "reason"], rows))
        if len(shown) < len(plan.excluded):
            print(f"... and {len(plan.excluded) - len(shown)} more (--excluded shows all)")
    return 0


def _answer_text(plan: Plan, answer: dict[str, Any]) -> str:
    from ds_autoplan.cli.table import degrees_text, seconds

    asked = " ".join(
        f"{key}={','.join(map(str, values))}" for key, values in answer["candidate"].items()
    )
    lines = [f"{asked}: {answer['verdict']}. {answer['reason']}"]
    for name, values in answer["pinned_otherwise"].items():
        lines.append(f"The plan was made with {name} pinned to {', '.join(map(str, values))}.")
    if "plan" in answer:
        other = answer["plan"]
        lines.append(
            f"Best such plan: {degrees_text(other)}, step {seconds(other['step_s'])} against "
            f"{seconds(plan.step_s)}"
        )
    return "\n".join(lines)

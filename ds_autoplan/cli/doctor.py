"""`ds-autoplan doctor`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from ds_autoplan.cli.jobs import add_json
from ds_autoplan.doctor import PROBLEM, Finding, examine

EPILOG = """examples:
  ds-autoplan doctor
  ds-autoplan doctor --config ds_config.json

Changes nothing. Status 1 where there is a problem; warnings leave it 0."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("--config", metavar="DS.json", help="also look at a DeepSpeed config")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show each finding as soon as it is known."""
    found: list[Finding] = []
    for finding in examine(args.config):
        found.append(finding)
        if not args.json:
            print(_line(finding), flush=True)
    problems = sum(finding.status == PROBLEM for finding in found)
    if args.json:
        print(json.dumps({"ok": problems == 0, "findings": [asdict(item) for item in found]}))
    else:
        count = "1 problem" if problems == 1 else f"{problems} problems"
        print(count if problems else "No problem found.", file=sys.stderr)
    return 1 if problems else 0


def _line(finding: Finding) -> str:
    text = f"{finding.status:<8} {finding.check:<14} {finding.detail}"
    return f"{text}\n{'':<24}{finding.remedy}" if finding.remedy else text

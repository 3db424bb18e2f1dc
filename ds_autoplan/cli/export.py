"""`ds-autoplan export`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ds_autoplan.cli.jobs import add_json, as_written
from ds_autoplan.errors import BadInputError
from ds_autoplan.export import TARGETS, export
from ds_autoplan.plan import Plan
from ds_autoplan.writing import make_folder, write_whole

EPILOG = """examples:
  ds-autoplan export plan.json --to megatron
  ds-autoplan export plan.json --to accelerate --out configs/

Files go to stdout, notes to stderr; with --out they go into that folder."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--to", required=True, choices=list(TARGETS))
    parser.add_argument("--out", metavar="FOLDER", help="write the files there; none is replaced")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the tool's files, or write them."""
    plan = Plan.load(args.plan)
    with as_written(args.plan):
        found = export(plan, args.to, str(Path(args.plan).resolve()))
    if args.out:
        _write(Path(args.out), found.files)
    if args.json:
        print(json.dumps({"to": args.to, "files": found.files, "notes": list(found.notes)}))
        return 0
    if not args.out:
        several = len(found.files) > 1
        for name, text in found.files.items():
            print(f"# {name}\n{text}" if several else text, end="\n" if several else "")
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _write(folder: Path, files: dict[str, str]) -> None:
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise BadInputError(
            f"The folder {str(folder)!r} has {' and '.join(there)} already.",
            "No file is replaced.",
            "Name another folder, or move them away.",
        )
    make_folder(folder)
    for name, text in files.items():
        write_whole(folder / name, text)
    print(f"Written to {folder}: {', '.join(files)}", file=sys.stderr)

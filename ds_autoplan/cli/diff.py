"""`ds-autoplan diff`."""

from __future__ import annotations

import argparse
import json

from ds_autoplan.cli.jobs import add_json
from ds_autoplan.plan import Plan

EPILOG = """example:
  ds-autoplan diff a.json b.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("before", metavar="A.json")
    parser.add_argument("after", metavar="B.json")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print what differs; status 0 whether or not anything does."""
    from ds_autoplan.explain import diff

    found = diff(Plan.load(args.before), Plan.load(args.after))
    if args.json:
        print(json.dumps(found))
        return 0
    from ds_autoplan.cli.table import seconds, table

    if found["same"]:
        print(f"The same plan ({found['fingerprints'][0]}).")
    rows = [[key, *pair] for part in ("facts", "degrees") for key, pair in found[part].items()]
    rows += [
        ["step", *(seconds(value) for value in found["step_s"])],
        ["peak GB", *(f"{value / 1e9:.1f}" for value in found["peak_bytes"])],
    ]
    rows += [
        [f"  {key}", *(seconds(value) for value in pair)]
        for key, pair in found["breakdown_s"].items()
        if any(pair)
    ]
    print(table(["", "before", "after"], rows))
    if found["stages"]:
        for name, bounds in zip(("before", "after"), found["stages"], strict=True):
            print(f"stages {name}: {' '.join(f'{first}-{end - 1}' for first, end in bounds)}")
    if found["layers"]:
        indices = _spans([item["index"] for item in found["layers"]])
        print(f"{len(found['layers'])} layers run differently: {indices}")
    return 0


def _spans(indices: list[int]) -> str:
    """Ascending numbers as spans: 0-3, 7."""
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][-1] + 1:
            spans[-1].append(index)
        else:
            spans.append([index])
    return ", ".join(f"{s[0]}-{s[-1]}" if len(s) > 1 else str(s[0]) for s in spans)

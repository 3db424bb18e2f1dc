"""`ds-autoplan validate`."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ds_autoplan.cli.jobs import add_json
from ds_autoplan.errors import BadInputError
from ds_autoplan.reading import number, parse_json, read_text

EPILOG = """example:
  ds-autoplan validate runs.jsonl --groups groups.json"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument("runs", metavar="RUNS.jsonl", help="one measured run a line")
    parser.add_argument("--groups", metavar="GROUPS.json", help="runs to rank against each other")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Price every run and print the errors."""
    from ds_autoplan.runs import load_runs
    from ds_autoplan.validate import validate

    groups = _groups(args.groups) if args.groups else None
    answer = validate(load_runs(args.runs), groups)
    if args.json:
        print(json.dumps(answer))
    else:
        _show(answer)
    return 0


def _groups(path: str) -> list[dict[str, Any]]:
    data = parse_json(read_text(path, "groups file"), f"The groups file {path!r}")
    groups = data.get("groups") if isinstance(data, dict) else data
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        raise BadInputError(
            f"The groups file {path!r} holds no list of groups.",
            'A group is an object whose "rows_fastest_first" lists runs by "id".',
        )
    return groups


def _is_group(group: object) -> bool:
    entries = group.get("rows_fastest_first", []) if isinstance(group, dict) else None
    return isinstance(entries, list) and all(_is_entry(entry) for entry in entries)


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
        return False
    seconds = entry.get("iteration_s")
    if seconds is None or seconds == 0:  # taken from the run
        return not isinstance(seconds, bool)
    number(seconds, f"The iteration_s of {entry['id']!r} in the groups file")
    return True


def _show(answer: dict[str, Any]) -> None:
    from ds_autoplan.cli.table import table

    summary = answer["summary"]
    print(f"{summary['supported']} of {summary['rows']} runs priced")
    kinds = [("all", summary["time"]), *summary["time_by_kind"].items()]
    kinds += [(f"  {name}", part) for name, part in summary["families"].items()]
    rows = [
        [
            name,
            part["n"],
            *(f"{part[key]:.1%}" for key in ("mape", "median_ape", "p90_ape", "bias")),
        ]
        for name, part in kinds
        if part["n"]
    ]
    print(table(["step time", "runs", "mean", "median", "p90", "bias"], rows))
    memory, ranking = summary["memory"], summary["ranking"]
    print(
        f"Memory: {memory['n']} runs, mean error {memory['mape']:.1%}, "
        f"worst under-prediction {memory['worst_under']:.1%}"
    )
    print(
        f"Ranking: {ranking['groups']} groups, mean regret {ranking['mean_regret']:.1%}, "
        f"largest {ranking['max_regret']:.1%}, Kendall tau {ranking['kendall_tau']:.2f}"
    )
    reasons: dict[str, int] = {}
    for row in answer["rows"]:
        if not row["supported"]:
            reasons[row["reason"]] = reasons.get(row["reason"], 0) + 1
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        print(f"Not priced ({count}): {reason}")

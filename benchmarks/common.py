"""What the benchmarks share: output, and running the whole command."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_autoplan.cli.table import table

ROOT = Path(__file__).resolve().parent.parent


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with --json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    return parser


def show(answer: dict[str, Any], columns: Sequence[str], rows: str, as_json: bool) -> None:
    """Print `answer` as JSON, or its list `rows` as a table and the rest below."""
    if as_json:
        print(json.dumps(answer))
        return
    print(table(columns, [[_cell(row.get(key)) for key in columns] for row in answer[rows]]))
    for key, value in answer.items():
        if key != rows:
            print(f"{key}: {_cell(value)}")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def run_command(words: Sequence[str]) -> dict[str, Any]:
    """Run `ds-autoplan` as a user does; wall and CPU seconds, peak memory, the JSON it printed."""
    command = [sys.executable, "-m", "ds_autoplan", *words, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, text=True
    )
    assert process.stdout is not None
    text = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "status": process.returncode,
        "wall_s": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1024,
        "answer": json.loads(text),
    }

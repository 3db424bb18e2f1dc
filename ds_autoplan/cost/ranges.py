"""How far a prediction may be off: the residuals of the nearest family of measured runs.

data/residuals.json holds, by engine, device architecture, precision and kind of model, the 90th
percentile of |predicted / measured - 1| when each family is predicted with constants fitted on the
others (`python -m benchmarks.cost_model RUNS.jsonl --leave-one-out --residuals FILE`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# The engine that works most alike, for engines with few published runs or none.
KIN = {
    "deepspeed": "fsdp",
    "torchtitan": "fsdp",
    "torchtitan-compiled": "fsdp",
    "torchtitan-2025": "fsdp",
    "megatron": "nemo",
    "nemo": "megatron",
}
# Error added per share of the step that rests on uncalibrated constants (matmul rates of devices
# without a measured run differ by this much from the share of the vendor's peak that is assumed).
UNCALIBRATED_SPREAD = 0.25
# Cells with fewer runs say little of how far others may be off.
FEWEST_RUNS = 8


@dataclass(frozen=True)
class Spread:
    """Relative half-width of a range, and the runs it comes from."""

    half_width: float
    family: str


@cache
def _table() -> list[dict[str, Any]]:
    path = Path(__file__).with_name("data") / "residuals.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return rows


@cache
def nearest_spread(engine: str, architecture: str, precision: str, mixture: bool) -> Spread:
    """Spread of the cell most like the setting: kind of model, precision, engine, device."""
    bits = "8-bit" if precision in ("fp8", "fp4") else "16-bit"

    def distance(row: dict[str, Any]) -> tuple[int, int]:
        far = 12 * (row["mixture"] != mixture) + 6 * (row["precision"] != bits)
        if row["engine"] != engine:
            far += 1 if row["engine"] == KIN.get(engine) else 3
        return far + 2 * (row["architecture"] != architecture), -int(row["runs"])

    found = min((row for row in _table() if row["runs"] >= FEWEST_RUNS), key=distance)
    name = f"{found['engine']}, {found['architecture']}, {found['precision']}"
    return Spread(float(found["p90"]), f"{name}, {found['runs']} runs")

"""`python -m benchmarks.scale`: the whole `plan` command, Python's start included, by size.

8 to 16,384 devices, 12 to 1,000 layers, and six problems that other planners were measured on:
their CPU-seconds (2 cores; each for its own, narrower search space) stand beside ours.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, run_command, show
from ds_autoplan.model import bundled_models

# CPU-seconds of Galvatron, Calculon and SimuMax on the same six problems, measured on 2 CPU cores.
PEERS: list[tuple[str, str, int, dict[str, float]]] = [
    ("llama-2-7b", "1x8", 128, {"Galvatron": 439, "Calculon": 12, "SimuMax": 27}),
    ("llama-2-13b", "1x8", 128, {"Calculon": 14, "SimuMax": 40}),
    ("llama-2-7b", "4x8", 512, {"Galvatron": 215, "Calculon": 26, "SimuMax": 33}),
    ("llama-2-13b", "4x8", 512, {"Calculon": 25, "SimuMax": 32}),
    ("llama-2-70b", "4x8", 512, {"Calculon": 38, "SimuMax": 87}),
    ("llama-2-70b", "16x8", 1024, {"Calculon": 43, "SimuMax": 81}),
]
SIZES = [
    ("llama-3-8b", "1x8xH100-SXM-80GB", 8192, 64),
    ("llama-3-70b", "8x8xH100-SXM-80GB", 8192, 512),
    ("gpt3-175b", "128x8xA100-SXM-80GB", 2048, 1536),
    ("llama-3-405b", "256x8xH100-SXM-80GB", 8192, 2048),
    ("llama-3-405b", "2048x8xH100-SXM-80GB", 8192, 2048),
]
DEPTHS = (12, 48, 192, 1000)


def main() -> None:
    """Run all problems and print them."""
    parser = arguments("Time of the whole plan command by size.")
    parser.add_argument("--backend", choices=("deepspeed", "megatron"), default="deepspeed")
    args = parser.parse_args()
    rows = []
    for model, cluster, seq, batch in SIZES:
        rows.append(_problem(model, model, cluster, seq, batch, args.backend))
    with tempfile.TemporaryDirectory() as folder:
        for depth in DEPTHS:
            config = {**bundled_models()["llama-2-7b"], "num_hidden_layers": depth}
            path = Path(folder) / f"{depth}-layers.json"
            path.write_text(json.dumps(config))
            cluster = "8x8xH100-SXM-80GB"
            rows.append(_problem(f"{depth} layers", str(path), cluster, 4096, 512, args.backend))
    for model, nodes, batch, peers in PEERS:
        cluster = f"{nodes}xA100-SXM-80GB,nic=200Gb"
        row = _problem(model, model, cluster, 2048, batch, args.backend)
        row["peers_cpu_s"] = ", ".join(f"{name} {value}" for name, value in peers.items())
        row["least_ratio"] = min(peers.values()) / row["cpu_s"]
        rows.append(row)
    columns = ["model", "cluster", "plan", "step_s", "gap", "candidates", "solved"]
    columns += ["wall_s", "cpu_s", "peak_mb", "peers_cpu_s", "least_ratio"]
    answer = {"rows": rows, "slowest_cpu_s": max(row["cpu_s"] for row in rows)}
    show(answer, columns, "rows", args.json)


def _problem(
    name: str, model: str, cluster: str, seq: int, batch: int, backend: str
) -> dict[str, Any]:
    words = ["plan", "--model", model, "--cluster", cluster, "--seq-length", str(seq)]
    words += ["--global-batch-size", str(batch), "--backend", backend]
    done = run_command(words)
    row: dict[str, Any] = {"model": name, "cluster": cluster, "sequence": seq, "batch": batch}
    row |= {key: done[key] for key in ("status", "wall_s", "cpu_s", "peak_mb")}
    if done["status"]:
        return {**row, "plan": "does not fit", "step_s": None, "gap": None}
    head = done["answer"]["plan"]
    text = f"tp{head['tp']} pp{head['pp']} dp{head['dp']} ZeRO-{head['zero_stage']}"
    return {
        **row,
        "plan": text + (f" vpp{head['vpp']}" if head["vpp"] > 1 else ""),
        "step_s": head["step_s"],
        "gap": head["solver"]["gap"],
        "candidates": head["solver"]["candidates"],
        "solved": head["solver"]["solved"],
    }


if __name__ == "__main__":
    main()

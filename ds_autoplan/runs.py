"""Measured runs: the file `validate` reads, and the line that a job under a plan adds to it.

One JSON object a line, in the schema of published runs (see cost/rows.py). A run of this plugin
also holds its plan, so that what is priced later is exactly what ran: uneven stages, each layer's
strategy, the measured cluster.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_autoplan.errors import BadInputError
from ds_autoplan.inputs import Inputs, recall
from ds_autoplan.plan import Plan
from ds_autoplan.reading import parse_json, read_text

GIB = 2**30
SOURCE = "ds_autoplan"


def load_runs(path: str | Path) -> list[dict[str, Any]]:
    """Read a runs file, one JSON object a line.

    Raises:
        BadInputError: missing file, or a line that is no JSON object.
    """
    lines = read_text(path, "runs file").splitlines()
    runs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        run = parse_json(line, f"Line {number} of {str(path)!r}")
        if not isinstance(run, dict):
            raise BadInputError(f"Line {number} of {str(path)!r} holds no JSON object.")
        runs.append(run)
    if not runs:
        raise BadInputError(
            f"The runs file {str(path)!r} holds no runs.", "One JSON object a line."
        )
    return runs


def check_writable(path: str | Path) -> None:
    """See that runs can be added to `path`; folders are made where they are missing.

    Raises:
        BadInputError: they cannot.
    """
    _append(path, "")


def append_run(path: str | Path, run: dict[str, Any]) -> None:
    """Add one run as one line.

    Raises:
        BadInputError: the file cannot be written.
    """
    _append(path, json.dumps(run, sort_keys=True) + "\n")


def _append(path: str | Path, text: str) -> None:
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise BadInputError(
            f"Measured runs cannot be added to {str(path)!r}: {error.strerror}.",
            '"report" names a file that rank 0 can write.',
        ) from error


def run_of(plan: Plan, step_s: float, peak_bytes: int, when: str) -> dict[str, Any]:
    """A measured run of `plan` as one object of a runs file.

    Args:
        plan: what ran.
        step_s: median seconds of an optimizer step; 0: not measured.
        peak_bytes: peak memory of the fullest rank.
        when: date and time of the run (ISO 8601); makes the run's id.

    Raises:
        BadInputError: the plan does not hold its inputs.
    """
    inputs, degrees = recall(plan), plan.degrees
    topology, workload = inputs.topology, inputs.workload
    tokens = workload.seq_length * workload.global_batch_size
    first = plan.layers[0].strategy
    measured = {
        "iteration_s": step_s or None,
        "tokens_per_s_per_gpu": tokens / step_s / degrees.world_size if step_s else None,
        "peak_mem_gb": peak_bytes / GIB,
        "peak_mem_unit": "GiB",
        "peak_mem_kind": "allocated",
    }
    return {
        "id": f"{plan.model}-{plan.fingerprint}-{when}",
        "source": SOURCE,
        "source_kind": "MEASURED",
        "model": _model(inputs),
        "hardware": {
            "gpu": topology.device.name,
            "gpus_per_node": topology.gpus_per_node,
            "nodes": topology.num_devices // topology.gpus_per_node,
            "n_gpus": topology.num_devices,
            "interconnect": topology.name,
        },
        "parallel": {
            "tp": degrees.tp,
            "pp": degrees.pp,
            "dp": degrees.dp,
            "cp": degrees.cp,
            "ep": degrees.ep,
            "vpp": degrees.vpp,
            "sp": first.sequence_parallel,
            "zero_stage": degrees.zero_stage,
            "recompute": first.activation_checkpointing,
        },
        "batch": {"global": plan.global_batch_size, "micro": degrees.micro_batch_size},
        "precision": plan.precision,
        "measured": measured,
        "plan": replace(plan, alternatives=(), excluded=()).to_json(),
    }


def _model(inputs: Inputs) -> dict[str, Any]:
    """The model's sizes under the names of published runs, from its most frequent block."""
    graph = inputs.graph
    block = graph.classes[Counter(graph.layers).most_common(1)[0][0]]
    attention, mlp = block.attention, block.mlp
    return {
        "name": graph.name,
        "layers": graph.num_layers,
        "hidden": graph.hidden_size,
        "ffn": mlp.intermediate_size if mlp else None,
        "heads": attention.num_heads if attention else None,
        "kv_heads": attention.num_kv_heads if attention else None,
        "vocab": graph.vocab_size,
        "seq": inputs.workload.seq_length,
        "gated_mlp": mlp.gated if mlp else None,
        "experts": mlp.num_experts if mlp else None,
        "topk": mlp.top_k if mlp else None,
    }

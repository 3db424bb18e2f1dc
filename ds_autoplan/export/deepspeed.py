"""DeepSpeed's JSON that pins the plan for this plugin, and accelerate's YAML that names it."""

from __future__ import annotations

import json

from ds_autoplan.cli.table import batch_text
from ds_autoplan.errors import UnsupportedError
from ds_autoplan.export import Export
from ds_autoplan.export.layout import require_no
from ds_autoplan.inputs import recall_any
from ds_autoplan.plan import Plan

JSON_NAME = "ds_config.json"
PRECISIONS = ("bf16", "fp16", "fp32")


def to_deepspeed(plan: Plan, plan_path: str) -> Export:
    """A DeepSpeed config whose `"autoplan"` key pins the plan.

    Raises:
        UnsupportedError: the plan is for another backend.
    """
    notes = (
        f"Start the script on {plan.degrees.world_size} ranks with this file. Keep your own keys "
        "(optimizer, scheduler, clipping); the batch keys may stay yours too.",
        _where(plan_path),
    )
    return Export({JSON_NAME: _config(plan, plan_path)}, notes)


def to_accelerate(plan: Plan, plan_path: str) -> Export:
    """Accelerate's configuration file, and the DeepSpeed JSON beside it.

    Raises:
        UnsupportedError: the plan is for another backend.
    """
    nodes = _nodes(plan)
    settings: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "num_machines": nodes,
        "num_processes": plan.degrees.world_size,
        "machine_rank": 0,
        "use_cpu": _on_cpus(plan),
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in settings.items()]
    lines += ["deepspeed_config:", f"  deepspeed_config_file: {JSON_NAME}"]
    lines += ["  zero3_init_flag: false"]
    notes = [
        f"accelerate launch --config_file accelerate.yaml script.py; {JSON_NAME} is looked for "
        "where the command starts.",
        _where(plan_path),
    ]
    if nodes > 1:
        notes.append(
            "Set machine_rank on each node, and main_process_ip and main_process_port, or use "
            "deepspeed's multi-node launcher."
        )
    files = {"accelerate.yaml": "\n".join(lines) + "\n", JSON_NAME: _config(plan, plan_path)}
    return Export(files, tuple(notes))


def _where(plan_path: str) -> str:
    return f"Every node reads the plan at {plan_path}."


def _config(plan: Plan, plan_path: str) -> str:
    if plan.backend != "deepspeed":
        raise UnsupportedError(
            f"The plan was made for the {plan.backend} backend.",
            "This plugin runs plans of the deepspeed backend.",
            "Make it again with --backend deepspeed, or export it to megatron.",
        )
    require_no(plan, "This plugin", cp=1, ep=1, vpp=1)
    if plan.precision not in PRECISIONS:
        raise UnsupportedError(
            f"The plan trains in {plan.precision}.",
            f"This plugin trains in {', '.join(PRECISIONS)}.",
            "Make the plan with --precision bf16.",
        )
    batch = plan.deepspeed()
    if batch["train_micro_batch_size_per_gpu"] is None:
        raise UnsupportedError(
            f"No DeepSpeed JSON has the plan's batch: {batch_text(plan)}.",
            "A DeepSpeed JSON states the batch of one rank, as data parallelism has it.",
            f"Plan for a multiple of {plan.degrees.world_size} samples.",
        )
    config = {**batch, "autoplan": {"plan": plan_path}}
    if plan.precision in ("bf16", "fp16"):
        config[plan.precision] = {"enabled": True}
    return json.dumps(config, indent=2) + "\n"


def _on_cpus(plan: Plan) -> bool:
    """Whether the plan is for processors: their cluster's architecture says so."""
    inputs = recall_any(plan)
    return inputs is not None and inputs.topology.device.architecture == "cpu"


def _nodes(plan: Plan) -> int:
    inputs = recall_any(plan)
    return plan.degrees.world_size // inputs.topology.gpus_per_node if inputs else 1

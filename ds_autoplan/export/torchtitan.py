"""torchtitan's job configuration: its [parallelism], [training] and [activation_checkpoint]."""

from __future__ import annotations

import json

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.export import Export
from ds_autoplan.export.layout import (
    checkpointing,
    chunks,
    require_1f1b,
    require_language_model,
    require_one_sequence_parallel,
    require_sharded_layers,
)
from ds_autoplan.plan import Plan
from ds_autoplan.strategy import DEFAULT_ORDER

PRECISION = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}


def to_torchtitan(plan: Plan, plan_path: str) -> Export:
    """A TOML file; the model's own section is the user's.

    Raises:
        UnsupportedError: torchtitan has no words for a part of the plan.
    """
    for require in (
        require_language_model,
        require_sharded_layers,
        require_1f1b,
        require_one_sequence_parallel,
    ):
        require(plan, "torchtitan")
    d = plan.degrees
    kinds = checkpointing(plan)
    if len(kinds) > 1:
        raise UnsupportedError(
            f"The plan checkpoints layers differently: {', '.join(sorted(kinds))}.",
            "torchtitan takes one mode for all layers.",
            "Make the plan with --pin activation_checkpointing=none, selective or full.",
        )
    if plan.precision not in PRECISION:
        raise UnsupportedError(
            f"The plan trains in {plan.precision}.",
            f"torchtitan trains in {', '.join(PRECISION)}.",
        )
    if d.ep > 1 and d.zero_stage == 0:
        raise UnsupportedError(
            f"The plan has ep={d.ep} and ZeRO 0.",
            "torchtitan places experts on the ranks that it shards parameters over.",
            "Make the plan with --pin zero_stage=1.",
        )
    shards = d.dp if d.zero_stage else 1
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": d.dp // shards,
        "data_parallel_shard_degree": shards,
        "fsdp_reshard_after_forward": "always" if d.zero_stage == 3 else "never",
        "tensor_parallel_degree": d.tp,
        "pipeline_parallel_degree": d.pp,
        "context_parallel_degree": d.cp,
        "expert_parallel_degree": d.ep,
    }
    if d.ep > 1:
        parallelism["expert_tensor_parallel_degree"] = d.tp
    if d.pp > 1:
        parallelism["pipeline_parallel_schedule"] = "Interleaved1F1B" if d.vpp > 1 else "1F1B"
        parallelism["pipeline_parallel_microbatch_size"] = d.micro_batch_size
        parallelism["module_fqns_per_model_part"] = _parts(plan)
    in_pipe = d.num_micro_batches if d.pp > 1 else 1
    training: dict[str, object] = {
        "local_batch_size": d.micro_batch_size * in_pipe,
        "global_batch_size": plan.global_batch_size,
        "seq_len": plan.seq_length,
        "mixed_precision_param": PRECISION[plan.precision],
    }
    kind = kinds.pop()
    checkpoint: dict[str, object] = {
        "mode": kind,
        **({"selective_ac_option": "op"} if kind == "selective" else {}),
    }
    sections = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": checkpoint,
    }
    text = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items())
        for name, section in sections.items()
    )
    return Export({"torchtitan.toml": text}, tuple(_notes(plan, kind)))


def _parts(plan: Plan) -> list[list[str]]:
    parts = [[f"layers.{layer.index}" for layer in chunk] for chunk in chunks(plan)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _notes(plan: Plan, kind: str) -> list[str]:
    d = plan.degrees
    notes = [f"For {d.world_size} ranks. Add [model], [optimizer] and the data's section."]
    if d.zero_stage in (1, 2):
        notes.append(
            f"torchtitan has no ZeRO {d.zero_stage}: FSDP without resharding keeps parameters "
            "whole and shards gradients and optimizer, the same traffic."
        )
    if d.order != DEFAULT_ORDER:
        notes.append(
            f"The plan puts the ranks in the order {d.order}; torchtitan's mesh has pp outermost, "
            f"as {DEFAULT_ORDER}. --pin order={DEFAULT_ORDER} plans for that."
        )
    if d.pp > 1:
        notes.append(
            "Names in module_fqns_per_model_part are those of torchtitan's Llama; other models' "
            "may differ."
        )
    if d.tp > 1 and not plan.layers[0].strategy.sequence_parallel:
        notes.append("The plan has no sequence parallelism; torchtitan's tensor parallelism does.")
    if kind == "selective":
        notes.append(
            "Selective checkpointing recomputes the attention core here, and all but every second "
            "GEMM and the core in torchtitan."
        )
    if plan.precision == "fp8":
        notes.append('fp8 needs the "float8" model converter.')
    return notes

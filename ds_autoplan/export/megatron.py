"""Megatron-LM's command line: the arguments of pretrain_gpt.py that state the plan."""

from __future__ import annotations

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.export import Export
from ds_autoplan.export.layout import (
    checkpointing,
    chunks,
    graph_of,
    is_even,
    require_1f1b,
    require_language_model,
    require_one_sequence_parallel,
    require_sharded_layers,
)
from ds_autoplan.plan import LayerPlan, Plan

ORDERS = {"tp-cp-ep-dp-pp": [], "tp-cp-ep-pp-dp": ["--use-tp-pp-dp-mapping"]}
PRECISION = {
    "bf16": ["--bf16"],
    "fp16": ["--fp16"],
    "fp32": [],
    "fp8": ["--bf16", "--fp8-format hybrid"],
}
SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def to_megatron(plan: Plan, plan_path: str) -> Export:
    """One argument a line, quoted for a shell; what the model needs besides is the user's.

    Raises:
        UnsupportedError: Megatron-LM has no words for a part of the plan.
    """
    for require in (
        require_language_model,
        require_sharded_layers,
        require_1f1b,
        require_one_sequence_parallel,
    ):
        require(plan, "Megatron-LM")
    d = plan.degrees
    sequence_parallel = d.tp > 1 and plan.layers[0].strategy.sequence_parallel
    if _has_experts(plan) and d.tp > 1 and not sequence_parallel:
        raise UnsupportedError(
            f"The plan has a mixture of experts and tp={d.tp} without sequence parallelism.",
            "Megatron-core trains mixtures under tp with sequence parallelism only.",
            "Make the plan with --pin sequence_parallel=true, or tp=1.",
        )
    if d.order not in ORDERS:
        raise UnsupportedError(
            f"The plan puts the ranks in the order {d.order}.",
            f"Megatron-LM knows {' and '.join(ORDERS)}.",
            "Pin the order, or train with this plugin.",
        )
    lines = [
        f"--tensor-model-parallel-size {d.tp}",
        f"--pipeline-model-parallel-size {d.pp}",
        f"--micro-batch-size {d.micro_batch_size}",
        f"--global-batch-size {plan.global_batch_size}",
        f"--seq-length {plan.seq_length}",
        *_precision(plan),
        *ORDERS[d.order],
    ]
    if d.cp > 1:
        lines.append(f"--context-parallel-size {d.cp}")
    if d.ep > 1:
        lines.append(f"--expert-model-parallel-size {d.ep}")
    if _has_experts(plan):
        lines += ["--moe-grouped-gemm", "--moe-token-dispatcher-type alltoall"]
    if sequence_parallel:
        lines.append("--sequence-parallel")
    lines += [*_sharding(plan), *_stages(plan), *_checkpointing(plan)]
    notes = [
        f"For {d.world_size} ranks. Add the model's own arguments, the data's and the optimizer's.",
    ]
    fsdp = d.zero_stage > 1
    if fsdp or d.tp * d.cp > 1:
        notes.append(
            "Megatron-LM's FSDP asks for CUDA_DEVICE_MAX_CONNECTIONS unset or above 1."
            if fsdp
            else "Up to Hopper, set CUDA_DEVICE_MAX_CONNECTIONS=1: transfers are overlapped."
        )
    if plan.backend == "deepspeed":
        notes.append(
            "The plan was priced for the deepspeed backend; `--backend megatron` also considers "
            "interleaved stages, cp and ep."
        )
    return Export({"megatron.args": "\n".join(lines) + "\n"}, tuple(notes))


def _has_experts(plan: Plan) -> bool:
    """Whether the model has mixture layers; plans made by hand do not say, and ep tells."""
    graph = graph_of(plan)
    if graph is None:
        return plan.degrees.ep > 1
    return any(block.mlp is not None and block.mlp.num_experts > 0 for block in graph.classes)


def _precision(plan: Plan) -> list[str]:
    if plan.precision not in PRECISION:
        raise UnsupportedError(
            f"The plan trains in {plan.precision}.",
            f"Exported to Megatron-LM are {', '.join(PRECISION)}.",
        )
    return PRECISION[plan.precision]


def _sharding(plan: Plan) -> list[str]:
    stage = plan.degrees.zero_stage
    if stage == 0:
        return []
    overlap = ["--overlap-grad-reduce", "--overlap-param-gather"]
    lines = ["--use-distributed-optimizer", *(overlap if plan.degrees.dp > 1 else [])]
    if stage > 1:
        lines += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {SHARDING[stage]}"]
        lines += ["--ckpt-format fsdp_dtensor", "--no-gradient-accumulation-fusion"]
    return lines


def _stages(plan: Plan) -> list[str]:
    """Uneven stages as a layout: E embedding, t one layer, L head and loss, | the next chunk."""
    d = plan.degrees
    if d.pp == 1:
        return []
    if not is_even(plan):
        parts = ["t" * len(chunk) for chunk in chunks(plan)]
        return [f"--pipeline-model-parallel-layout 'E{'|'.join(parts)}L'"]
    if d.vpp > 1:
        return [f"--num-layers-per-virtual-pipeline-stage {len(plan.layers) // (d.pp * d.vpp)}"]
    return []


def _checkpointing(plan: Plan) -> list[str]:
    kinds = checkpointing(plan)
    if kinds == {"none"}:
        return []
    if kinds == {"selective"}:
        return ["--recompute-granularity selective"]
    if kinds == {"full"}:
        return [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    full = [
        [layer.strategy.activation_checkpointing == "full" for layer in chunk]
        for chunk in chunks(plan)
    ]
    most = max(sum(chunk) for chunk in full)
    if kinds != {"none", "full"} or any(sum(c) != min(most, len(c)) for c in full):
        each = ", ".join(f"{kind} in some layers" for kind in sorted(kinds))
        least = min(sum(chunk) for chunk in full)
        raise UnsupportedError(
            f"The plan checkpoints {each}, in full {least} to {most} layers a stage.",
            "Megatron-LM checkpoints the same number of layers in each stage.",
            "Make the plan with --pin activation_checkpointing=none, selective or full.",
        )
    firsts = all(all(chunk[:most]) for chunk in full)
    if not firsts and not _all_alike(plan, chunks(plan)):
        raise UnsupportedError(
            "The plan checkpoints chosen layers, and the model's layers differ.",
            "Megatron-LM checkpoints the first layers of each stage.",
            "Make the plan with --pin activation_checkpointing=none, selective or full.",
        )
    return [
        "--recompute-granularity full",
        "--recompute-method block",
        f"--recompute-num-layers {most}",
    ]


def _all_alike(plan: Plan, cut: list[list[LayerPlan]]) -> bool:
    """Whether the layers of each chunk are of one class, so that it is equal which are chosen."""
    graph = graph_of(plan)
    return graph is None or all(
        len({graph.layers[layer.index] for layer in chunk}) <= 1 for chunk in cut
    )

"""Apply a plan to a Hugging Face model, in place: stage, shards, recomputation, re-layouts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from ds_autoplan.integrations.megatron import regions
from ds_autoplan.integrations.transformers.recompute import recompute
from ds_autoplan.integrations.transformers.shard import Shard, Sharder
from ds_autoplan.integrations.transformers.stage import StageCut
from ds_autoplan.integrations.transformers.structure import ModelStructure
from megatron.core import parallel_state
from torch import nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.plan import Plan


@dataclass
class AppliedPlan:
    """A model under a plan, as this rank holds it."""

    structure: ModelStructure
    cut: StageCut | None
    shards: dict[str, Shard] = field(default_factory=dict)


def apply_plan(structure: ModelStructure, plan: Plan, device: torch.device) -> AppliedPlan:
    """Cut and shard a model to `plan`; Megatron-core's parallel state is set already.

    Every rank starts from the whole model; rank 0's weights are taken, as data parallelism does.

    Raises:
        UnsupportedError: the plan asks for what the model's structure does not allow.
    """
    degrees = plan.degrees
    _check(structure, plan)
    if degrees.model_parallel_size > 1:
        broadcast_weights(structure.model, device)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    first, last = plan.stage_bounds[stage]
    cut = StageCut(structure, first, last) if degrees.pp > 1 else None
    owned = structure.blocks[first:last]
    sharder = Sharder(structure, degrees.tp, parallel_state.get_tensor_model_parallel_rank())
    has_embedding = cut is None or cut.is_first
    has_head = cut is None or cut.is_last
    if degrees.tp > 1:
        if plan.vocabulary == "shard":
            sharder.vocabulary(has_embedding, has_head)
        for block in owned:
            sharder.block(block, plan.layers[block.index].strategy)
        _convert_between_blocks(structure, plan, first, last)
    for block in owned:
        recompute(block, plan.layers[block.index].strategy.activation_checkpointing)
    return AppliedPlan(structure, cut, sharder.shards)


def _check(structure: ModelStructure, plan: Plan) -> None:
    degrees = plan.degrees
    name = type(structure.model).__name__
    if len(plan.layers) != len(structure.blocks):
        raise UnsupportedError(
            f"The plan is for {len(plan.layers)} layers, {name} has {len(structure.blocks)}.",
            "A plan fits one model.",
            "Make the plan again for this model.",
        )
    if degrees.pp > 1 and structure.pipeline_refusal:
        raise UnsupportedError(
            f"{name} cannot run with pp {degrees.pp}: {structure.pipeline_refusal}.",
            "",
            'Set "pipeline": false in "autoplan".',
        )
    if degrees.tp > 1 and structure.tensor_refusal:
        raise UnsupportedError(
            f"{name} cannot run with tp {degrees.tp}: {structure.tensor_refusal}.",
            "Every weight of a block must be known before any is sharded.",
            'Set "tensor_parallel": false in "autoplan".',
        )
    if plan.precision in ("bf16", "fp16") and degrees.zero_stage == 0:
        if degrees.model_parallel_size > 1:
            raise UnsupportedError(
                f"The plan has {plan.precision}, ZeRO 0, tp {degrees.tp} and pp {degrees.pp}.",
                "DeepSpeed's 16-bit optimizers without ZeRO take a part of the gradient norm then.",
                "Use ZeRO stage 1 (the planner does, unless zero_stage is pinned).",
            )
    covered = [index for first, last in plan.stage_bounds for index in range(first, last)]
    if covered != list(range(len(structure.blocks))):
        raise UnsupportedError(
            f"The stages {plan.stage_bounds} do not cover layers 0 to {len(structure.blocks) - 1}.",
            "Every layer belongs to exactly one stage, in order.",
            "Make the plan again.",
        )


def broadcast_weights(model: nn.Module, device: torch.device) -> None:
    """Give every rank the weights and buffers of rank 0."""
    for tensor in [*model.parameters(), *model.buffers()]:
        moved = tensor.data.to(device).contiguous()
        if moved.dtype == torch.bool:
            as_bytes = moved.to(torch.uint8)
            dist.broadcast(as_bytes, src=0)
            moved = as_bytes.to(torch.bool)
        else:
            dist.broadcast(moved, src=0)
        if tensor.data.data_ptr() != moved.data_ptr():
            tensor.data.copy_(moved)


def _convert_between_blocks(structure: ModelStructure, plan: Plan, first: int, last: int) -> None:
    """Split the sequence where sequence-parallel blocks begin, join it where they end."""
    parallel = [layer.strategy.sequence_parallel for layer in plan.layers]
    for block in structure.blocks[first:last]:
        before = parallel[block.index - 1] if block.index else False
        if parallel[block.index] and not before:
            regions.convert_input(block.module, regions.split_sequence)
        elif before and not parallel[block.index]:
            regions.convert_input(block.module, regions.join_sequence)
        if block.index == len(structure.blocks) - 1 and parallel[block.index]:
            regions.convert_output(block.module, regions.join_sequence)

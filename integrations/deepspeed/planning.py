"""Plan a running job: on rank 0, from the model itself, for the ranks that started."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from ds_autoplan.integrations.deepspeed.batch import BatchSettings
from ds_autoplan.integrations.deepspeed.detect import detect_cluster
from ds_autoplan.integrations.deepspeed.solve import solve
from ds_autoplan.integrations.transformers.structure import ModelStructure
from torch import nn

from ds_autoplan.cluster import Topology
from ds_autoplan.config import AutoplanConfig
from ds_autoplan.errors import AutoplanError, UnsupportedError
from ds_autoplan.plan import Plan
from ds_autoplan.workload import Workload

log = logging.getLogger("ds_autoplan")


def plan_together(
    model: nn.Module,
    structure: ModelStructure | None,
    refusal: str,
    config: dict[str, Any],
    autoplan: AutoplanConfig,
    batch: BatchSettings,
) -> Plan:
    """Rank 0 makes (or reads) the plan; all ranks get the same one.

    Raises:
        AutoplanError: on every rank, if there is no plan.
    """
    topology = None if autoplan.plan else detect_cluster(autoplan.cluster, autoplan.calibrate)
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            box[0] = _plan(model, structure, refusal, config, autoplan, batch, topology).to_json()
        except AutoplanError as error:
            box[0] = error
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], AutoplanError):
        raise box[0]
    plan = Plan.from_json(box[0])
    prints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(prints, plan.fingerprint)
    if len(set(prints)) != 1:
        raise UnsupportedError(
            f"The ranks read different plans: {sorted(set(prints))}.",
            "All ranks run one plan.",
            "Install the same version of ds_autoplan on every node.",
        )
    if dist.get_rank() == 0:
        _show(plan, batch)
    return plan


def _plan(
    model: nn.Module,
    structure: ModelStructure | None,
    refusal: str,
    config: dict[str, Any],
    autoplan: AutoplanConfig,
    batch: BatchSettings,
    topology: Topology | None,
) -> Plan:
    if autoplan.plan is not None:
        plan = Plan.load(autoplan.plan)
        if plan.global_batch_size != batch.total:
            raise UnsupportedError(
                f"The plan {autoplan.plan!r} is for {plan.global_batch_size} samples per step, "
                f"the config says {batch.total}.",
                "A plan fits one batch size.",
                "Make the plan again, or correct the batch settings.",
            )
    else:
        assert topology is not None
        job = workload(config, autoplan, batch, model)
        stages = zero_stages(config)
        plan = solve(model, structure, refusal, job, autoplan, topology, stages)
    _check_call(plan, batch)
    return plan


def workload(
    config: dict[str, Any], autoplan: AutoplanConfig, batch: BatchSettings, model: nn.Module
) -> Workload:
    """The job as the planner sees it."""
    text = model.config.get_text_config() if hasattr(model, "config") else None
    longest = getattr(text, "max_position_embeddings", None) or 2048
    precision = "fp32"
    for name in ("bf16", "fp16"):
        if config.get(name, {}).get("enabled"):
            precision = name
    return Workload(
        seq_length=autoplan.seq_length or longest,
        global_batch_size=batch.total,
        precision=precision,
        optimizer=str(config.get("optimizer", {}).get("type", "adamw")).lower(),
        backend="deepspeed",
        gradient_accumulation_steps=batch.accumulation_steps,
        gradient_clipping=float(config.get("gradient_clipping", 1.0)),
    )


def zero_stages(config: dict[str, Any]) -> list[int]:
    """ZeRO stages that the script is written for.

    Under stage 3 no rank holds a weight whole, so a script must save in another way: the plan uses
    it only where the user's config does. Offload settings belong to their stage.
    """
    zero = config.get("zero_optimization", {})
    stage = int(zero.get("stage", 0))
    if zero.get("offload_optimizer") or zero.get("offload_param"):
        return [stage]
    return [0, 1, 2, 3] if stage == 3 else [0, 1, 2]


def _check_call(plan: Plan, batch: BatchSettings) -> None:
    per_call = batch.micro * plan.degrees.model_parallel_size
    if per_call % plan.degrees.micro_batch_size:
        raise UnsupportedError(
            f"The plan's micro-batch holds {plan.degrees.micro_batch_size} samples; one call of "
            f"the engine brings {per_call} to a replica ({batch.micro} from each of "
            f"{plan.degrees.model_parallel_size} ranks).",
            "A call is cut into whole micro-batches.",
            "Pin a micro_batch_size that divides it, or change train_micro_batch_size_per_gpu.",
        )


def _show(plan: Plan, batch: BatchSettings) -> None:
    degrees = plan.degrees
    lines = [
        f"ds_autoplan: plan {plan.fingerprint} for {plan.model}: tp {degrees.tp} x pp {degrees.pp} "
        f"x dp {degrees.dp}, ZeRO stage {degrees.zero_stage}, "
        f"micro-batch {degrees.micro_batch_size}, "
        f"vocabulary {plan.vocabulary}",
        f"  batch: {batch.total} samples a step = {batch.micro} per rank and call x "
        f"{batch.accumulation_steps} calls x {dist.get_world_size()} ranks",
    ]
    for index, stage in enumerate(plan.stages):
        strategies = sorted(
            {str(_strategy_words(layer)) for layer in plan.layers if layer.stage == index}
        )
        lines.append(
            f"  stage {index}: layers {stage.first_layer}-{stage.last_layer}, "
            f"{stage.time_s * 1e3:.1f} ms a micro-batch, {stage.peak_bytes / 2**30:.2f} GiB; "
            + "; ".join(strategies)
        )
    lines.append(
        f"  predicted: {plan.step_s:.3f} s a step, {plan.tokens_per_s:.0f} tokens/s "
        f"({plan.uncalibrated_fraction:.0%} of it rests on uncalibrated constants)"
    )
    for other in plan.alternatives[:3]:
        lines.append(
            f"  runner-up: tp {other.get('tp')} pp {other.get('pp')} dp {other.get('dp')} "
            f"ZeRO {other.get('zero_stage')}: {other.get('why')}"
        )
    log.warning("\n".join(lines))


def _strategy_words(layer: Any) -> str:
    strategy = layer.strategy
    words = [f"attention {strategy.attention}", f"mlp {strategy.mlp}"]
    if strategy.sequence_parallel:
        words.append("sequence parallel")
    words.append(f"checkpointing {strategy.activation_checkpointing}")
    return ", ".join(words)

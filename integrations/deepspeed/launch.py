"""`deepspeed.initialize` for a job whose config has "autoplan": plan, apply, start DeepSpeed.

1. read the config and check that nothing else claims the model's parallelism
2. start torch.distributed
3. take the model apart, and plan on rank 0; every rank gets the same plan
4. set Megatron-core's parallel state to it
5. cut and shard the model in place
6. hand the rest to DeepSpeed, with the batch settings of the replica
7. give the engine the script's view
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import groups
from ds_autoplan.integrations.deepspeed.batch import BatchSettings, batch_settings
from ds_autoplan.integrations.deepspeed.ds_config import check_config, inner_config, read_config
from ds_autoplan.integrations.deepspeed.engine import AutoplanEngine
from ds_autoplan.integrations.deepspeed.failure import fail_together, report_on_rank_0
from ds_autoplan.integrations.deepspeed.measure import StepClock, base_bytes
from ds_autoplan.integrations.deepspeed.optimizers import check_optimizer, keep_owned
from ds_autoplan.integrations.deepspeed.partitioned import make_whole
from ds_autoplan.integrations.deepspeed.pipeline import AutoplanPipelineEngine, StageModule
from ds_autoplan.integrations.deepspeed.planning import plan_together
from ds_autoplan.integrations.deepspeed.replica import Replica
from ds_autoplan.integrations.megatron import state
from ds_autoplan.integrations.transformers.apply import apply_plan
from ds_autoplan.integrations.transformers.structure import ModelStructure, analyse, tied_names
from ds_autoplan.integrations.transformers.weights import (
    WeightService,
    answer_with_whole_weights,
    whole_under_zero_3,
)
from megatron.core import parallel_state
from torch import nn

from ds_autoplan.config import AutoplanConfig, parse_autoplan
from ds_autoplan.errors import AutoplanError, BadInputError, UnsupportedError
from ds_autoplan.plan import Plan
from ds_autoplan.runs import append_run, check_writable, run_of

log = logging.getLogger("ds_autoplan")


def initialize(
    original: Callable[..., Any],
    *,
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """As `deepspeed.initialize`, under a plan.

    Args:
        original: DeepSpeed's own function.
        args: see `deepspeed.initialize`, as all that follow.
        model: see above.
        optimizer: see above.
        model_parameters: see above.
        training_data: see above.
        lr_scheduler: see above.
        distributed_port: see above.
        mpu: must be None: the plan owns the process groups.
        dist_init_required: see above.
        collate_fn: see above.
        config: see above.
        mesh_param: must be None, as `mpu`.
        config_params: see above.

    Returns:
        (engine, optimizer, data loader, lr scheduler), as DeepSpeed.

    Raises:
        AutoplanError: on every rank; rank 0 prints the message.
    """
    report_on_rank_0()
    ds_config = read_config(args, config if config is not None else config_params)
    autoplan = parse_autoplan(ds_config.pop("autoplan", None))
    assert autoplan is not None, "the hook calls this only where the key is on"
    _start_distributed(distributed_port, dist_init_required)
    with fail_together():
        if model is None:
            raise BadInputError("deepspeed.initialize was called without a model.")
        check_config(ds_config, model, mpu, mesh_param)
        if autoplan.report is not None and dist.get_rank() == 0:
            check_writable(autoplan.report)
        batch = batch_settings(ds_config, dist.get_world_size())
        make_whole(model)
        structure, refusal = _structure(model)
        plan = plan_together(model, structure, refusal, ds_config, autoplan, batch)
        parameters = _listed(model_parameters)
        check_optimizer(optimizer, model, ds_config, plan)
    engine, training = _start(
        original, model, structure, plan, autoplan, ds_config, batch,
        optimizer=optimizer, parameters=parameters, training_data=training_data,
        rest={"args": _without_config(args), "lr_scheduler": lr_scheduler,
              "distributed_port": distributed_port, "collate_fn": collate_fn},
    )  # fmt: skip
    return engine, engine.optimizer, training, engine.lr_scheduler


def _start_distributed(port: int, required: bool | None) -> None:
    import deepspeed

    if torch.cuda.is_available():
        # The first collectives come before DeepSpeed's engine picks this rank's GPU.
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank < torch.cuda.device_count():
            torch.cuda.set_device(local_rank)
    else:
        # DeepSpeed would compile a shared-memory op at first use: a minute, and a stale lock if
        # killed.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        deepspeed.init_distributed(distributed_port=port, dist_init_required=required)
    elif not deepspeed.comm.is_initialized():
        deepspeed.init_distributed()


def _structure(model: nn.Module) -> tuple[ModelStructure | None, str]:
    """The model's structure, or why only data parallelism can run it."""
    try:
        return analyse(model), ""
    except UnsupportedError as error:
        return None, str(error)


def _listed(parameters: Any) -> list[Any] | None:
    """Parameters given as a generator, read before the model is cut."""
    return None if parameters is None else list(parameters)


def _without_config(args: Any) -> Any:
    """The script's arguments without the config, which is given as a dict now."""
    import copy

    if getattr(args, "deepspeed_config", None) is None:
        return args
    changed = copy.copy(args)
    changed.deepspeed_config = None
    return changed


def _start(
    original: Callable[..., Any],
    model: nn.Module,
    structure: ModelStructure | None,
    plan: Plan,
    autoplan: AutoplanConfig,
    ds_config: dict[str, Any],
    batch: BatchSettings,
    *,
    optimizer: Any,
    parameters: list[Any] | None,
    training_data: Any,
    rest: dict[str, Any],
) -> tuple[Any, Any]:
    degrees = plan.degrees
    state.initialize(degrees)
    names, tied, base = list(model.state_dict()), tied_names(model), base_bytes(model)
    device = _device()
    replica = None
    module: nn.Module = model
    shards: dict[str, Any] = {}
    if structure is not None:
        applied = apply_plan(structure, plan, device)
        shards = applied.shards
        if degrees.model_parallel_size > 1 or degrees.micro_batch_size < batch.micro:
            replica = Replica(plan, structure, applied.cut, device, autoplan.logits)
        if replica is not None and degrees.pp > 1:
            optimizer, parameters = keep_owned(model, optimizer, parameters)
            module = StageModule(replica)
    # DeepSpeed keeps the unit of an engine before this one where it is given none (pp > 1).
    groups.mpu = None
    engine, _, _, _ = original(
        model=module,
        optimizer=optimizer,
        model_parameters=parameters,
        config=inner_config(ds_config, plan, batch),
        mpu=None if degrees.pp > 1 else state.MegatronMpu(),
        **rest,
    )
    engine.__class__ = AutoplanPipelineEngine if degrees.pp > 1 else AutoplanEngine
    engine.replica, engine.script_batch = replica, batch
    engine.clock = StepClock(_report(plan, base, autoplan.report))
    if replica is not None:
        replica.install()
        if degrees.pp > 1:
            replica.run_stages = engine.run_stages
    if replica is not None or (degrees.zero_stage == 3 and hasattr(model, "save_pretrained")):
        engine.weight_service = _serve_weights(model, names, tied, shards, plan)
    training = engine.deepspeed_io(training_data) if training_data is not None else None
    engine.training_dataloader = training
    return engine, training


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def _serve_weights(
    model: nn.Module,
    names: list[str],
    tied: dict[str, str],
    shards: dict[str, Any],
    plan: Plan,
) -> WeightService:
    group = parallel_state.get_model_parallel_group()
    service = WeightService(model, names, tied, shards, group, plan.degrees.tp)
    if plan.degrees.zero_stage == 3:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        tp_group = parallel_state.get_tensor_model_parallel_group()
        answer_with_whole_weights(model, lambda: whole_under_zero_3(service, parameters, tp_group))
    else:
        answer_with_whole_weights(model, service.whole)
    return service


def _report(plan: Plan, base: int, file: str | None) -> Callable[[float, int], None]:
    """What to do with the measurement: log it beside the prediction, and add it to `file`."""

    def report(step_s: float, peak_bytes: int) -> None:
        peaks = torch.tensor([float(peak_bytes - base)], device=_device())
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            predicted = max((stage.peak_bytes for stage in plan.stages), default=0)
            log.warning(
                "ds_autoplan: step time predicted %.3f s, measured %.3f s (median); "
                "peak memory predicted %.2f GiB, measured %.2f GiB (largest rank)",
                plan.step_s,
                step_s,
                predicted / 2**30,
                float(peaks) / 2**30,
            )
            if file is not None:
                when = datetime.now(timezone.utc).isoformat(timespec="seconds")
                try:
                    append_run(file, run_of(plan, step_s, int(peaks), when))
                except BadInputError as error:  # the training that runs is worth more
                    log.warning("ds_autoplan: %s", error)

    return report


__all__ = ["AutoplanError", "initialize"]

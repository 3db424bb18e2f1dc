"""The user's DeepSpeed config: read, checked, and rewritten for the replica."""

from __future__ import annotations

import copy
from typing import Any

from ds_autoplan.integrations.deepspeed.batch import BatchSettings
from torch import nn

from ds_autoplan.errors import BadInputError, UnsupportedError
from ds_autoplan.hook import config_text, parse_config
from ds_autoplan.plan import Plan

MODEL_IN_CONTROL = 'The plan sets tensor, pipeline and sequence parallelism when "autoplan" is on.'


def read_config(args: Any, config: Any) -> dict[str, Any]:
    """The config as a dict of its own, however it was given.

    Raises:
        BadInputError: it was given twice, is missing, or cannot be read.
    """
    from_args = getattr(args, "deepspeed_config", None)
    if config is not None and from_args is not None:
        raise BadInputError(
            "The DeepSpeed config was given twice: in --deepspeed_config and in initialize().",
            "",
            "Give one of them.",
        )
    given = config if config is not None else from_args
    if isinstance(given, dict):
        return copy.deepcopy(given)
    if given is None:
        raise BadInputError("No DeepSpeed config was given.", "", "Pass --deepspeed_config FILE.")
    try:
        loaded = parse_config(config_text(given))
    except (OSError, ValueError) as error:
        raise BadInputError(f"The DeepSpeed config {given!r} cannot be read: {error}.") from error
    if not isinstance(loaded, dict):
        raise BadInputError(f"The DeepSpeed config {given!r} holds no JSON object.")
    return loaded


def check_config(config: dict[str, Any], model: nn.Module, mpu: Any, mesh_param: Any) -> None:
    """Refuse what else claims the model's parallelism, and values nobody resolved.

    Raises:
        BadInputError: an "auto" was left.
        UnsupportedError: another owner of process groups, or DeepSpeed's own parallelism.
    """
    from deepspeed.runtime.pipe.module import PipelineModule

    remedy = 'Remove it, or remove "autoplan".'
    if isinstance(model, PipelineModule):
        raise UnsupportedError("The model is a DeepSpeed PipelineModule.", MODEL_IN_CONTROL, remedy)
    if mpu is not None or mesh_param is not None:
        given = "an mpu" if mpu is not None else "mesh_param"
        raise UnsupportedError(f"initialize() was given {given}.", MODEL_IN_CONTROL, remedy)
    sections = {
        "tensor_parallel.autotp_size": config.get("tensor_parallel", {}).get("autotp_size", 0),
        "sequence_parallel_size": config.get("sequence_parallel_size", 1),
        "hybrid_engine.enabled": config.get("hybrid_engine", {}).get("enabled", False),
    }
    for name, value in sections.items():
        if value not in (0, 1, None, False):
            raise UnsupportedError(f"{name} is {value!r}.", MODEL_IN_CONTROL, remedy)
    left = list(_autos(config, ""))
    if left:
        raise BadInputError(
            f"{left[0]} is 'auto'.",
            "Only the Hugging Face Trainer and accelerate resolve 'auto'.",
            "Set a value.",
        )


def _autos(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _autos(item, f"{place}.{key}" if place else str(key))
    elif value == "auto":
        yield place


def inner_config(config: dict[str, Any], plan: Plan, batch: BatchSettings) -> dict[str, Any]:
    """The config DeepSpeed gets: the replica's batch settings, the plan's ZeRO stage."""
    inner = copy.deepcopy(config)
    inner.update(batch.inside(plan.degrees.model_parallel_size))
    zero = dict(inner.get("zero_optimization", {}))
    zero["stage"] = plan.degrees.zero_stage
    inner["zero_optimization"] = zero
    if plan.degrees.pp > 1:
        pipeline = (
            dict(inner.get("pipeline", {})) if isinstance(inner.get("pipeline"), dict) else {}
        )
        # Hidden states are sent as they are: sequence parallelism has split them already.
        inner["pipeline"] = {**pipeline, "pipe_partitioned": False, "grad_partitioned": False}
    return inner

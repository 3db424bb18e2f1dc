"""The user's optimizer under a plan: what can be kept, and what must be refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.plan import Plan

# Optimizers that update every element by itself, so a shard is updated as the whole would be.
ELEMENTWISE = (
    "adam",
    "adamw",
    "adamax",
    "nadam",
    "radam",
    "sgd",
    "rmsprop",
    "adagrad",
    "adadelta",
    "lion",
    "fusedadam",
    "cpuadam",
    "deepspeedcpuadam",
    "fusedlion",
    "deepspeedcpulion",
    "deepspeedcpuadagrad",
    "dummyoptim",
)


def check_optimizer(optimizer: Any, model: nn.Module, config: dict[str, Any], plan: Plan) -> None:
    """Refuse an optimizer that could not go on with the cut parameters.

    Raises:
        UnsupportedError: it has state already, owns parameters that are not the model's, or works
        on whole
            matrices while the plan shards them.
    """
    if plan.degrees.model_parallel_size == 1:
        return
    remedy = 'Set "tensor_parallel": false and "pipeline": false in "autoplan", or use AdamW.'
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Optimizer):
        if optimizer.state:
            raise UnsupportedError(
                f"The optimizer {name} already holds state for {len(optimizer.state)} parameters.",
                "It must be new: its state has the shapes of the uncut weights.",
                "Call deepspeed.initialize before the first step, or load its state afterwards.",
            )
        own = {id(parameter) for parameter in model.parameters()}
        foreign = [
            p for group in optimizer.param_groups for p in group["params"] if id(p) not in own
        ]
        if foreign:
            raise UnsupportedError(
                f"The optimizer {name} holds {len(foreign)} parameters that are not the model's "
                f"(the first has shape {list(foreign[0].shape)}).",
                "Only the model's own parameters can be cut with it.",
                remedy,
            )
    elif optimizer is None:
        name = str(config.get("optimizer", {}).get("type", "adam"))
    else:
        return  # a callable that DeepSpeed calls with the cut parameters
    if plan.degrees.tp > 1 and name.lower() not in ELEMENTWISE:
        raise UnsupportedError(
            f"The optimizer {name} is not known to update every element by itself.",
            f"Under tp {plan.degrees.tp} each rank holds a part of a matrix.",
            remedy,
        )


def keep_owned(
    model: nn.Module, optimizer: Any, parameters: list[Any] | None
) -> tuple[Any, list[Any] | None]:
    """Drop from parameter groups what other pipeline stages own; the groups themselves stay."""
    owned = {id(parameter) for parameter in model.parameters()}
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in owned]
    if parameters is None:
        return optimizer, None
    kept: list[Any] = []
    for item in parameters:
        if isinstance(item, dict):
            mine = [p for p in item["params"] if id(p) in owned]
            if mine:
                kept.append({**item, "params": mine})
        elif id(item) in owned:
            kept.append(item)
    return optimizer, kept

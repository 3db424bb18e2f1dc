"""Gradient norms over a replica: every weight counted once, wherever its shards and copies lie."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn


def counts_here(parameter: nn.Parameter) -> bool:
    """Whether this rank counts a parameter: all ranks for shards, tp rank 0 for whole weights.

    A tied copy on a later stage never counts.
    """
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    sharded = getattr(parameter, "tensor_model_parallel", False)
    return sharded or parallel_state.get_tensor_model_parallel_rank() == 0


def global_norm(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> float:
    """L2 norm of the gradients of the whole model; `group` is the replica's ranks."""
    mine = [p.grad for p in parameters if p.grad is not None and counts_here(p)]
    device = mine[0].device if mine else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in mine:
        total += gradient.double().pow(2).sum()
    dist.all_reduce(total, group=group)
    return float(total.sqrt())


def clip_by_global_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup
) -> float:
    """Scale all gradients to a global norm of at most `max_norm`; returns the norm before."""
    held = list(parameters)
    norm = global_norm(held, group)
    scale = max_norm / (norm + 1e-6)
    if scale < 1.0:
        for parameter in held:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
    return norm

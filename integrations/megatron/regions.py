"""Where a block's tensor-parallel regions begin and end, and its hidden states between them.

Between blocks hidden states are *whole* on every tp rank, [batch, sequence, hidden], or, under
sequence parallelism, *split*: [batch, sequence / tp, hidden]. A sharded part (attention, MLP) is a
region: at its entry every rank gets the whole input, at its exit (the row-parallel layer) the
    partial results are summed.

    hidden states   entry of a sharded part            gradient
    whole           identity                           all-reduce
    split           all-gather over the sequence       reduce-scatter

A part that is replicated computes the same on every rank: nothing to do where hidden states are
whole; where they are split, attention (which mixes tokens) gathers at its entry and takes its own
piece at its exit, and an MLP (which does not) just runs on its piece.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn


def enter_sharded(hidden: Tensor, sequence_parallel: bool, token_dim: int) -> Tensor:
    """Give every tp rank the whole input of a sharded part; the gradient is summed over tp."""
    if not sequence_parallel:
        return copy_to_tensor_model_parallel_region(hidden)
    return _gather(hidden, token_dim, output_gradient_is_partial=True)


# What Hugging Face's own modules get is contiguous: some take views of it (GPT-2's Conv1D).


def split_sequence(hidden: Tensor) -> Tensor:
    """[batch, sequence, hidden] on every rank -> this rank's [batch, sequence / tp, hidden]."""
    sequence_first = hidden.transpose(0, 1).contiguous()
    return scatter_to_sequence_parallel_region(sequence_first).transpose(0, 1).contiguous()


def join_sequence(hidden: Tensor) -> Tensor:
    """The inverse of :func:`split_sequence`; what follows computes the same on every rank."""
    return _gather(hidden, 1, output_gradient_is_partial=False).contiguous()


def _gather(hidden: Tensor, token_dim: int, output_gradient_is_partial: bool) -> Tensor:
    if token_dim == 0:
        return gather_from_sequence_parallel_region(
            hidden.contiguous(), tensor_parallel_output_grad=output_gradient_is_partial
        )
    gathered = gather_from_sequence_parallel_region(
        hidden.transpose(0, 1).contiguous(),
        tensor_parallel_output_grad=output_gradient_is_partial,
    )
    return gathered.transpose(0, 1)


def convert_input(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Convert the hidden states `module` is called with (first, or as `hidden_states=`)."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (convert(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": convert(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def convert_output(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Convert the hidden states that `module` returns (the value, or the first of a tuple)."""

    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (convert(output[0]), *output[1:])
        return convert(output)

    module.register_forward_hook(hook)


def sum_gradient_over_tp(parameter: nn.Parameter) -> None:
    """All-reduce the gradient of a replicated parameter whose gradient is a part on each tp rank.

    Which ones: norms inside a region (each rank sees its own heads), anything that runs on a piece
    of the sequence, projections of which each rank uses some rows.
    """
    if parameter.requires_grad:
        parameter.register_hook(_all_reduce_over_tp)


def _all_reduce_over_tp(gradient: Tensor) -> Tensor:
    gradient = gradient.contiguous().clone()
    dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient

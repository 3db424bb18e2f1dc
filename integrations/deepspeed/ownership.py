"""Taking back what belongs to a rank: outputs of its own samples, with the right gradient.

Let r be a rank of a replica of g ranks, and let it compute its loss from its own rows of a
replica's output. Data parallelism averages the losses of all ranks; DeepSpeed averages over the dp
replicas; so the replica owes the gradient of (1/g) * sum of its ranks' losses. The functions here
hand a rank its own rows in the forward, and in the backward gather all ranks' gradients and divide
by g.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class OwnRows(torch.autograd.Function):
    """This rank's rows of a tensor that every rank holds: [rows, ...] -> [own, ...]."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, counts: tuple[int, ...], group: Any) -> Tensor:
        """Cut the own rows; `counts` holds the rows of each rank of `group`."""
        ctx.counts, ctx.group = counts, group
        rank = dist.get_rank(group)
        start = sum(counts[:rank])
        return whole[start : start + counts[rank]].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """All ranks' rows, divided by the number of ranks."""
        gradient = gradients[0].contiguous()
        pieces = [gradient.new_empty((count, *gradient.shape[1:])) for count in ctx.counts]
        _all_gather_uneven(pieces, gradient, ctx.group)
        return torch.cat(pieces) / len(ctx.counts), None, None


class OwnLogits(torch.autograd.Function):
    """Own rows with the whole vocabulary, from every rank's shard of it.

    [rows, sequence, vocabulary / tp] on each rank -> [own, sequence, vocabulary]; an all-to-all.
    """

    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, counts: tuple[int, ...], vocab_size: int, group: Any
    ) -> Tensor:
        """Send each rank its rows of this shard and join the shards of the own rows."""
        ctx.counts, ctx.group, ctx.shape = counts, group, shard.shape
        own = counts[dist.get_rank(group)]
        shape = (own, *shard.shape[1:])
        received = _all_to_all(shard, [list(counts), [own] * len(counts)], group)
        pieces = [piece.reshape(shape) for piece in received.chunk(len(counts))]
        return torch.cat(pieces, dim=-1)[..., :vocab_size].contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send each rank the gradient of its shard; padding columns get zero."""
        gradient = gradients[0]
        local = ctx.shape[-1]
        missing = local * len(ctx.counts) - gradient.shape[-1]
        padded = torch.nn.functional.pad(gradient, (0, missing))
        by_shard = torch.cat(padded.split(local, dim=-1))
        own = gradient.shape[0]
        received = _all_to_all(by_shard, [[own] * len(ctx.counts), list(ctx.counts)], ctx.group)
        return received.reshape(ctx.shape) / len(ctx.counts), None, None, None


def _all_gather_uneven(pieces: list[Tensor], value: Tensor, group: Any) -> None:
    largest = max(piece.numel() for piece in pieces)
    buffer = value.new_zeros(largest)
    buffer[: value.numel()] = value.reshape(-1)
    buffers = [torch.empty_like(buffer) for _ in pieces]
    dist.all_gather(buffers, buffer, group=group)
    for piece, gathered in zip(pieces, buffers, strict=True):
        piece.copy_(gathered[: piece.numel()].reshape(piece.shape))


def _all_to_all(value: Tensor, rows: list[list[int]], group: Any) -> Tensor:
    """Exchange flat rows; `rows` holds how many go to, and come from, each rank."""
    send, receive = rows
    width = value[0].numel() if value.shape[0] else torch.Size(value.shape[1:]).numel()
    output = value.new_empty((sum(receive), width))
    dist.all_to_all_single(
        output, value.reshape(-1, width).contiguous(), receive, send, group=group
    )
    return output

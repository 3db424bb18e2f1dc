"""The loss of a call whose backward is done already.

Forward has run forward and backward, micro-batch by micro-batch, with a factor on each rank's loss
that is only a guess: what the script does with its loss (`loss * c`, `loss / steps`,
`backward(scale_wrt_gas=False)`) is seen in `backward`. There the true factor is read off the
script's own little graph. Where it is another than the guess, the call is run once more for the
difference: gradients are linear in the factors, so

    gradient for f  =  gradient for the guess e  +  gradient for (f - e)

and f is the guess for the next call, so a script that keeps one factor pays for it once. Ranks may
have different factors; every rank of a replica learns all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_autoplan.errors import UnsupportedError

# Factors that differ by less (relative) give the same gradients in fp32.
SAME = 1e-6


class _Released(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, owner: ReleasedLoss) -> Tensor:
        ctx.owner = owner
        return value.clone() + anchor.detach() * 0

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if not ctx.owner.reading:
            raise UnsupportedError(
                "loss.backward() was called on a loss whose gradients are computed already.",
                "Under pipeline stages or several micro-batches the engine must see the backward.",
                "Call engine.backward(loss), once for each call of the engine.",
            )
        return gradients[0], None, None


class ReleasedLoss:
    """One call's loss, whose graph is an anchor that tells what the script did with it."""

    def __init__(self, value: Tensor) -> None:
        """Wrap the value of a loss so that `backward` can be called on it."""
        self.reading = False
        self.anchor = torch.zeros((), device=value.device, dtype=value.dtype, requires_grad=True)
        self.loss: Tensor = _Released.apply(self.anchor, value, self)

    def factor(self, loss: Tensor) -> float:
        """The derivative of what the script calls backward on, by the loss of the call.

        Raises:
            UnsupportedError: `loss` depends on anything else that needs a gradient, or not on this
            call.
        """
        gradient = None
        self.reading = True
        try:
            if loss.requires_grad and all(leaf is self.anchor for leaf in _leaves(loss)):
                gradient = torch.autograd.grad(loss, self.anchor, allow_unused=True)[0]
        finally:
            self.reading = False
        if gradient is None:
            raise UnsupportedError(
                "backward was called on a value that is not made of the last call's loss alone.",
                "Under pipeline stages or several micro-batches forward computes the gradients of "
                "the loss the model returns, and of nothing else.",
                "Call backward once on that loss after each call, or set "
                '"pipeline": false in "autoplan" and pin its "micro_batch_size" to a whole call.',
            )
        return float(gradient)


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Every tensor that a backward from `loss` would reach."""
    seen: set[Any] = set()
    ahead = [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        ahead.extend(following for following, _ in node.next_functions)


def gather_factors(factor: float, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The factor of every rank of a replica, on each of them: [g], float64 on the CPU."""
    mine = torch.tensor([factor], dtype=torch.float64, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    return torch.cat(every).cpu()


def first_guess(inputs: dict[str, Any], accumulation_steps: int, size: int) -> Tensor:
    """Factors that the script's first `backward` will ask for, as far as its call tells: [g].

    A script that passes `num_items_in_batch` (Hugging Face Trainer) has normalised over the whole
    accumulation; it asks DeepSpeed not to divide again, and multiplies by the ranks.
    """
    guess = dist.get_world_size() if "num_items_in_batch" in inputs else 1.0 / accumulation_steps
    return torch.full((size,), float(guess), dtype=torch.float64)


def same_factors(one: Tensor, other: Tensor) -> bool:
    """Whether two sets of factors give the same gradients."""
    return bool(((one - other).abs() <= SAME * one.abs().max()).all())

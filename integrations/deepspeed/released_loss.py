"""The loss of a call whose backward is done already.

Forward has run forward and backward, micro-batch by micro-batch, for an expected factor on the
loss. What the script then does with its loss (`loss * c`, `loss / steps`,
`backward(scale_wrt_gas=False)`) is only seen in `backward`: there the factor is read off the
script's own little graph and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_autoplan.errors import UnsupportedError


class _Released(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, anchor: Tensor, value: Tensor) -> Tensor:
        return value.clone() + anchor.detach() * 0

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        return gradients[0], None


@dataclass
class ReleasedLoss:
    """One call's loss, and the factor that its gradients were computed for.

    `expected` is the factor of the gradients relative to the gradient of the loss itself: 1 /
    accumulation steps, or 1 where the script divides by the items of the whole batch itself.
    """

    anchor: Tensor
    loss: Tensor
    expected: float

    @classmethod
    def of(cls, value: Tensor, expected: float) -> ReleasedLoss:
        """Wrap the value of a loss so that `backward` can be called on it."""
        anchor = torch.zeros((), device=value.device, dtype=value.dtype, requires_grad=True)
        return cls(anchor, _Released.apply(anchor, value), expected)

    def factor(self, loss: Tensor, scale: float) -> float:
        """What the script's `backward(loss)` asks for, relative to what was computed.

        Args:
            loss: what the script calls backward on.
            scale: what the engine would multiply it with (1 / accumulation steps, or 1).

        Raises:
            UnsupportedError: `loss` does not come from this call, so its gradient cannot be given.
        """
        gradient = None
        if loss.requires_grad:
            gradient = torch.autograd.grad(loss, self.anchor, allow_unused=True)[0]
        if gradient is None:
            raise UnsupportedError(
                "backward was called on a value that is not the loss of the engine's last call.",
                "Under pipeline stages or several micro-batches forward computes the gradients of "
                "the loss the model returns.",
                "Call backward once on that loss after each call, or set "
                '"pipeline": false in "autoplan".',
            )
        return float(gradient) * scale / self.expected


def expected_factor(inputs: dict[str, Any], accumulation_steps: int) -> float:
    """Factor that the script's `backward` will ask for, as far as its call tells.

    A script that passes `num_items_in_batch` (Hugging Face Trainer) has normalised over the whole
    accumulation and asks DeepSpeed not to divide again.
    """
    return 1.0 if "num_items_in_batch" in inputs else 1.0 / accumulation_steps

"""One pipeline stage of a Hugging Face model: the model's own forward over the blocks it owns.

A stage keeps the model's forward, so masks, rotary tables, ALiBi and position ids are computed by
Hugging Face's own code from the batch, on every stage; only hidden states cross a boundary. Blocks
of other stages are skipped. On a later stage, weights that are used before the first block give
zeros of the right shape, and the first own block takes the received hidden states in place of what
came so far. On an earlier stage the forward ends after the last own block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ds_autoplan.integrations.transformers.structure import (
    Block,
    ModelStructure,
    replace_module,
)
from torch import Tensor, nn


class StageEnd(Exception):
    """Leaves the model's forward after the stage's last block, with its hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        """Carry `hidden` out of the forward."""
        super().__init__("end of a pipeline stage")
        self.hidden = hidden


class StageCut:
    """Cuts a model to the blocks `first`..`last` - 1 and runs them."""

    def __init__(self, structure: ModelStructure, first: int, last: int) -> None:
        """Drop what other stages own, in place. Stages must be cut before weights are sharded."""
        self.structure = structure
        self.is_first, self.is_last = first == 0, last == len(structure.blocks)
        self.received: Tensor | None = None
        model = structure.model
        stack = model.get_submodule(structure.blocks_name)
        owned = structure.blocks[first:last]
        for block in structure.blocks[:first] + structure.blocks[last:]:
            skipped = SkippedBlock(block.module, structure.returns_tuple)
            stack[block.index] = skipped
            # The structure lives as long as the engine: what it names would keep its memory.
            structure.blocks[block.index] = Block(block.index, block.name, skipped, None, None)
        shared = set(structure.prologue) & set(structure.epilogue)
        if not self.is_first:
            for name in structure.prologue:
                if name not in shared:
                    replace_module(model, name, ZerosLike(structure.widths[name], self._dtype))
            owned[0].module.register_forward_pre_hook(self._receive, with_kwargs=True)
        if not self.is_last:
            for name in structure.epilogue:
                if name not in shared:
                    replace_module(model, name, nn.Identity())
            owned[-1].module.register_forward_hook(self._finish)
        self.owned = owned

    def run(self, forward: Any, received: Tensor | None, inputs: dict[str, Any]) -> Any:
        """Run the stage on one micro-batch.

        Args:
            forward: the model's own forward.
            received: hidden states of the previous stage; None on the first.
            inputs: the micro-batch, as the model takes it.

        Returns:
            Hidden states, or on the last stage what the model returns.
        """
        self.received = received
        try:
            return forward(**inputs)
        except StageEnd as end:
            return end.hidden
        finally:
            self.received = None

    def _dtype(self) -> torch.dtype:
        """Type of the hidden states: an engine may cast the model after it was cut."""
        assert self.received is not None
        return self.received.dtype

    def _receive(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (self.received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.received}

    def _finish(self, _: nn.Module, __: Any, output: Any) -> None:
        raise StageEnd(output[0] if isinstance(output, tuple) else output)


class SkippedBlock(nn.Module):
    """Stands for a block of another stage: passes its input on, keeps its plain attributes."""

    def __init__(self, block: nn.Module, returns_tuple: bool) -> None:
        """Copy what the model's loop may read from a block (its attention type, its index)."""
        super().__init__()
        self.returns_tuple = returns_tuple
        for name, value in vars(block).items():
            if name not in vars(self) and isinstance(value, (str, int, float, bool, type(None))):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states, as the block would return them."""
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, None) if self.returns_tuple else hidden


class ZerosLike(nn.Module):
    """Stands for an embedding (or what follows it) on a stage that does not own it."""

    def __init__(self, width: int, dtype: Callable[[], torch.dtype]) -> None:
        """Give zeros of last dimension `width`, of the type that `dtype` answers at each call."""
        super().__init__()
        self.width, self.dtype = width, dtype

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> Tensor:
        """Token ids [...] -> zeros [..., width]; hidden states [..., any] -> zeros [..., width]."""
        is_hidden = input_.is_floating_point() and input_.dim() > 2
        shape = input_.shape[:-1] if is_hidden else input_.shape
        return torch.zeros((), dtype=self.dtype(), device=input_.device).expand(*shape, self.width)

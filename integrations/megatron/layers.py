"""Megatron-core's tensor-parallel layers in the shape Hugging Face modules call them.

Three differences to the plain layers. They return the output alone, not (output, bias). They take
[batch, sequence, features] (Megatron-core: sequence first). And the column-parallel layer leaves
the all-reduce of its input's gradient to the *region* it stands in (see regions.py): q, k and v
share one. The weight is always the Hugging Face Parameter itself, cut in place, so an optimizer
that holds it stays valid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from ds_autoplan.integrations.megatron.state import layer_config
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn


def _no_initialization(weight: Tensor) -> None:
    """Megatron-core asks for an initialiser even where it is told not to use one."""


class ColumnParallel(ColumnParallelLinear):
    """Y = X W^T with the rows of W over tp; the output stays sharded."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        entry: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take `weight` [rows / tp, in] and `bias` [rows / tp], both cut already.

        Args:
            weight: the shard of this rank.
            bias: the shard of this rank, or None.
            entry: what opens the region where no module around the layer does (a head; an MLP whose
                layers stand in the block itself).
        """
        tp = parallel_state.get_tensor_model_parallel_world_size()
        with torch.device("meta"):
            super().__init__(
                weight.shape[1],
                weight.shape[0] * tp,
                config=layer_config(weight.dtype, sequence_parallel=False),
                init_method=_no_initialization,
                bias=bias is not None,
                gather_output=False,
                disable_grad_reduce=True,
            )
        self.entry = entry
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.weight, self.bias = weight, bias

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        """[..., in] -> [..., rows / tp]."""
        if self.entry is not None:
            input_ = self.entry(input_)
        return super().forward(input_)[0]


class RowParallel(RowParallelLinear):
    """Y = X W^T + b with the columns of W over tp: products are summed over tp, then b is added.

    Under sequence parallelism the sum is a reduce-scatter: over dim 1 of [batch, sequence, out]
    where the order of tokens matters (attention), else over dim 0, which needs no transposition.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        sequence_parallel: bool,
        token_dim: int,
        writable: bool = False,
    ) -> None:
        """Take `weight` [out, columns / tp], cut already, and the whole `bias` [out].

        Args:
            weight: the shard of this rank.
            bias: the whole bias, or None.
            sequence_parallel: whether the sum is a reduce-scatter.
            token_dim: its dimension, see above.
            writable: the model adds to the output in place, which autograd forbids on the output of
                a communication function: give it a copy.
        """
        tp = parallel_state.get_tensor_model_parallel_world_size()
        with torch.device("meta"):
            super().__init__(
                weight.shape[1] * tp,
                weight.shape[0],
                config=layer_config(weight.dtype, sequence_parallel),
                init_method=_no_initialization,
                bias=bias is not None,
                input_is_parallel=True,
                skip_bias_add=False,
            )
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.token_dim, self.writable = token_dim, writable
        self.weight, self.bias = weight, bias

    def forward(self, input_: Tensor) -> Tensor:  # type: ignore[override]
        """[batch, sequence, columns / tp] -> [batch, sequence (/ tp), out]."""
        if not self.sequence_parallel or self.token_dim == 0:
            output = super().forward(input_)[0]
        else:
            sequence_first = input_.transpose(0, 1).contiguous()
            output = super().forward(sequence_first)[0].transpose(0, 1)
        return output.clone() if self.writable and self.bias is None else output


class SelectedColumns(nn.Module):
    """Y = X W[rows]^T where W is whole on every tp rank and `rows` is what this rank computes.

    For projections whose rows several ranks need, such as the keys and values of fewer kv heads
    than tp. The gradient of W is a part of the whole on each rank and is summed over tp.
    """

    rows: Tensor

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, rows: Tensor) -> None:
        """Take the whole `weight` [out, in] and `bias` [out]; `rows` may repeat an index."""
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], rows.numel()
        self.weight, self.bias = weight, bias
        self.register_buffer("rows", rows, persistent=False)

    def forward(self, input_: Tensor) -> Tensor:
        """[..., in] -> [..., len(rows)]."""
        bias = None if self.bias is None else self.bias.index_select(0, self.rows)
        return functional.linear(input_, self.weight.index_select(0, self.rows), bias)


class VocabParallel(VocabParallelEmbedding):
    """A word embedding with its rows over tp, padded to a multiple of tp; keeps `padding_idx`.

    As in torch's embedding, the row of `padding_idx` gets no gradient from a lookup.
    """

    def __init__(
        self, weight: nn.Parameter, padding_idx: int | None, factor: float | Tensor | None
    ) -> None:
        """Take `weight` [padded vocabulary / tp, hidden], cut already.

        Args:
            weight: the shard of this rank.
            padding_idx: index in the whole vocabulary, or None.
            factor: what the output is multiplied by (embeddings that scale themselves); a tensor is
                rounded to the weight's type first, as those embeddings do that hold it as a buffer.
        """
        tp = parallel_state.get_tensor_model_parallel_world_size()
        with torch.device("meta"):
            super().__init__(
                weight.shape[0] * tp,
                weight.shape[1],
                init_method=_no_initialization,
                config=layer_config(weight.dtype, sequence_parallel=False),
            )
        self.weight = weight
        self.factor = factor
        local = None if padding_idx is None else padding_idx - self.vocab_start_index
        inside = local is not None and 0 <= local < weight.shape[0]
        self.padding_idx = local if inside else None

    def forward(self, input_: Tensor) -> Tensor:
        """[...] token ids -> [..., hidden], the same on every tp rank."""
        outside = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local = (input_ - self.vocab_start_index).masked_fill(outside, 0)
        output = functional.embedding(local, self.weight, self.padding_idx)
        output = output.masked_fill(outside.unsqueeze(-1), 0.0)
        output = reduce_from_tensor_model_parallel_region(output)
        return scaled(output, self.factor)


def scaled(rows: Tensor, factor: float | Tensor | None) -> Tensor:
    """Rows of an embedding times its factor; a tensor is rounded to their type first."""
    if factor is None:
        return rows
    if isinstance(factor, Tensor):
        return rows * factor.to(rows.device, rows.dtype)
    return rows * factor

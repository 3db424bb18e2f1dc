"""The loss of a replica: cross entropy over a sharded vocabulary, kept apart by source rank.

Let n_r be what rank r divides its loss by: its valid labels (a label that is not -100, after the
shift by one), or the `num_items_in_batch` it passed. The loss rank r reports is

    L_r = (1 / n_r) * sum over the valid tokens t of r's samples of nll(t)

and the replica trains on (1/g) * sum_r L_r. Both are sums over tokens, so samples may be cut into
micro-batches at will: a micro-batch contributes its tokens' share of every L_r.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from ds_autoplan.integrations.deepspeed.exchange import IGNORE_INDEX, ReplicaBatch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor


@dataclass(frozen=True)
class LossShares:
    """What one call's loss is divided by.

    Attributes:
        divisors: n_r for each source rank: [g], float32.
        sources: source rank of each sample: [samples].
        counted: whether a sample counts (rows that only fill up a micro-batch do not): [samples].
    """

    divisors: Tensor
    sources: Tensor
    counted: Tensor

    @classmethod
    def of(cls, batch: ReplicaBatch) -> LossShares:
        """Count the labels of each source rank."""
        labels = shifted_labels(batch.tensors)
        sources = batch.sources(labels.device)
        items = batch.scalars.get("num_items_in_batch")
        if items is not None:
            divisors = items.float()
        elif isinstance(batch.others.get("num_items_in_batch"), (int, float)):
            divisors = labels.new_full(
                (len(batch.samples),), batch.others["num_items_in_batch"], dtype=torch.float32
            )
        else:
            per_sample = (labels != IGNORE_INDEX).flatten(1).sum(1).float()
            divisors = per_sample.new_zeros(len(batch.samples)).index_add_(0, sources, per_sample)
        return cls(divisors, sources, torch.ones_like(sources, dtype=torch.bool))

    def rows(self, index: Tensor, counted: Tensor) -> LossShares:
        """The shares of some samples, of which only `counted` ones count."""
        return LossShares(self.divisors, self.sources[index], counted)


def shifted_labels(tensors: dict[str, Tensor]) -> Tensor:
    """Labels aligned with the logits that predict them: [samples, sequence]."""
    if "shift_labels" in tensors:
        return tensors["shift_labels"]
    return functional.pad(tensors["labels"], (0, 1), value=IGNORE_INDEX)[..., 1:]


def loss_by_source(
    logits: Tensor, labels: Tensor, shares: LossShares, vocab_size: int, sharded: bool
) -> Tensor:
    """Each source rank's share of its loss in one micro-batch: [g].

    Args:
        logits: [samples, sequence, vocabulary], or this tp rank's padded shard of the vocabulary.
        labels: [samples, sequence], already shifted.
        shares: whose samples they are and what their loss is divided by.
        vocab_size: entries of the vocabulary without padding.
        sharded: whether the vocabulary is sharded over tp.
    """
    logits = logits.float()
    valid = (labels != IGNORE_INDEX) & shares.counted[:, None]
    targets = labels.masked_fill(~valid, 0)
    if sharded:
        logits = _hide_padding(logits, vocab_size)
        # Megatron-core subtracts the maximum in place: it must not reach the caller's logits.
        nll = vocab_parallel_cross_entropy(logits.clone(), targets)
    else:
        flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        nll = flat.view_as(targets)
    per_sample = nll.masked_fill(~valid, 0.0).sum(1)
    sums = per_sample.new_zeros(shares.divisors.numel())
    return sums.index_add(0, shares.sources, per_sample) / shares.divisors


def _hide_padding(logits: Tensor, vocab_size: int) -> Tensor:
    """Columns that only pad the vocabulary get a probability of zero."""
    local = logits.shape[-1]
    start = parallel_state.get_tensor_model_parallel_rank() * local
    if start + local <= vocab_size:
        return logits
    columns = torch.arange(start, start + local, device=logits.device)
    return logits.masked_fill(columns >= vocab_size, torch.finfo(logits.dtype).min)


class LossFunction:
    """Stands for a Hugging Face model's `loss_function` while a replica runs.

    The caller sets `shares` before each micro-batch; the model then returns the loss by source
    rank.
    """

    def __init__(self, vocab_size: int, sharded: bool) -> None:
        """Take the vocabulary's true size and whether it is sharded over tp."""
        self.vocab_size, self.sharded = vocab_size, sharded
        self.shares: LossShares | None = None

    def __call__(self, logits: Tensor, labels: Tensor, *_: Any, **kwargs: Any) -> Tensor:
        """[samples, sequence, vocabulary (/ tp)] and labels -> [g]."""
        assert self.shares is not None
        named = {"labels": labels}
        if isinstance(kwargs.get("shift_labels"), Tensor):
            named["shift_labels"] = kwargs["shift_labels"]
        return loss_by_source(
            logits, shifted_labels(named), self.shares, self.vocab_size, self.sharded
        )

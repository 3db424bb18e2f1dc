"""Random numbers over tp: the same where ranks compute the same, different where they hold shards.

A replica runs every micro-batch under a random state of its own, seeded alike on all ranks of a tp
group (the script's state is put back afterwards). What is replicated over tp then draws the same
dropout masks on every rank. A part that is sharded (heads, columns of an MLP, a piece of the
sequence) *splits* the state: it draws one number d from the common state and seeds with d and its
tp rank; where the part ends, ranks *rejoin*: they seed with a number that follows from d alone.

    common state --draw d--> seed(d, tp rank)  ...  seed(d + 1) --> common again

Both are functions of the current random state (d is read off the current seed), so activation
checkpointing, which restores that state and runs a part again, draws the same masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

# The CPU's generator reads the low 32 bits of a seed only, so they must tell ranks apart:
# seed(d, rank) = (d + (rank + 1) * STRIDE) mod 2^32, and above them rank + 1 (0: common state).
RANK_BIT, DRAWN = 32, 2**32
STRIDE = 0x9E3779B1  # 2^32 / golden ratio, odd: neighbouring ranks lie far apart


def draws_in_training(model: nn.Module) -> bool:
    """Whether the model drops anything: a dropout module, or a rate in its config or modules."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any(_is_rate(name, value) for name, value in vars(module).items()):
            return True
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    values = text.to_dict() if text is not None else {}
    return any(_is_rate(name, value) for name, value in values.items())


def _is_rate(name: str, value: Any) -> bool:
    words = ("drop", "jitter")
    return isinstance(value, float) and value > 0 and any(word in name for word in words)


def split() -> None:
    """Begin what differs between tp ranks; nothing happens inside such a part."""
    if not _seed() >> RANK_BIT:
        drawn = int(torch.randint(DRAWN, (), device="cpu"))
        number = parallel_state.get_tensor_model_parallel_rank() + 1
        torch.manual_seed((drawn + number * STRIDE) % DRAWN + (number << RANK_BIT))


def rejoin() -> None:
    """Begin what is the same on all tp ranks; nothing happens outside of a part that differs."""
    number = _seed() >> RANK_BIT
    if number:
        torch.manual_seed((_seed() - number * STRIDE + 1) % DRAWN)


def _seed() -> int:
    return torch.random.default_generator.initial_seed()


class ReplicaRandom:
    """The random states of one replica's micro-batches, on one stage; equal on its tp ranks."""

    def __init__(self, seed: int, replica: int, stage: int) -> None:
        """Take the job's seed, and what it is told apart by."""
        told_apart = hashlib.sha256(f"{seed} {replica} {stage}".encode()).digest()
        self.base = int.from_bytes(told_apart[:8], "big") % DRAWN
        self.count = 0

    @contextmanager
    def micro_batch(self) -> Iterator[None]:
        """Run the next micro-batch."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed((self.base + self.count) % DRAWN)
            self.count += 1
            yield


def split_before(module: nn.Module) -> None:
    """Let `module` begin a part that differs between tp ranks."""
    module.register_forward_pre_hook(_when_training(split))


def rejoin_before(module: nn.Module) -> None:
    """Let `module` begin a part that is the same on all tp ranks."""
    module.register_forward_pre_hook(_when_training(rejoin))


def split_after(module: nn.Module) -> None:
    """Let what follows `module` differ between tp ranks."""
    module.register_forward_hook(_when_training(split))


def rejoin_after(module: nn.Module) -> None:
    """Let what follows `module` be the same on all tp ranks."""
    module.register_forward_hook(_when_training(rejoin))


def _when_training(change: Any) -> Any:
    def hook(module: nn.Module, *_: Any) -> None:
        if module.training:
            change()

    return hook

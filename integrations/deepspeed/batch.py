"""Batch arithmetic: train_batch_size = micro * accumulation * ranks, as the script computed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_autoplan.errors import BadInputError

TOTAL, MICRO, STEPS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@dataclass(frozen=True)
class BatchSettings:
    """One job's batch as the script sees it: samples a step, a call, calls a step."""

    total: int
    micro: int
    accumulation_steps: int

    def inside(self, replica_size: int) -> dict[str, int]:
        """The same batch as DeepSpeed sees it, with world / `replica_size` data-parallel ranks."""
        return {TOTAL: self.total, MICRO: self.micro * replica_size, STEPS: self.accumulation_steps}


def batch_settings(config: dict[str, Any], world: int) -> BatchSettings:
    """Fill in what a DeepSpeed config leaves out, by DeepSpeed's own rules.

    Raises:
        BadInputError: a value is no positive integer, all three are missing, or they contradict.
    """
    total, micro, steps = (_value(config, key) for key in (TOTAL, MICRO, STEPS))
    if total is None and micro is None:
        raise BadInputError(
            f"The DeepSpeed config gives neither {TOTAL!r} nor {MICRO!r}.",
            "One of them must be known.",
            f"Set {MICRO!r} to the batch size of your data loader.",
        )
    if micro is None:
        steps = steps or 1
        micro = _divide(total, world * steps, f"{TOTAL} / (ranks * {STEPS})")
    if steps is None:
        steps = (
            1 if total is None else _divide(total, world * micro, f"{TOTAL} / (ranks * {MICRO})")
        )
    if total is None:
        total = micro * steps * world
    if total != micro * steps * world:
        raise BadInputError(
            f"{TOTAL} is {total}, but {MICRO} * {STEPS} * ranks is {micro} * {steps} * {world} = "
            f"{micro * steps * world}.",
            "To the script a job under a plan is data parallel over all ranks.",
            "Correct one of the three.",
        )
    return BatchSettings(total, micro, steps)


def _value(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1 or isinstance(value, bool):
        hint = " ('auto' is resolved by the Hugging Face Trainer only)" if value == "auto" else ""
        raise BadInputError(
            f"{key} is {value!r}.", "It must be a positive integer" + hint + ".", "Set a number."
        )
    return number


def _divide(value: int | None, by: int, what: str) -> int:
    assert value is not None
    quotient, rest = divmod(value, by)
    if rest or quotient < 1:
        raise BadInputError(
            f"{what} is {value} / {by}, which is no positive integer.",
            "Every rank feeds the same number of samples.",
            "Change the batch size or the number of ranks.",
        )
    return quotient

"""Measured step time and peak memory of a running job, to set beside the plan's prediction."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import torch
from torch import nn

# Steps that warm up caches and allocators, and the steps that are measured after them.
WARM_UP_STEPS, MEASURED_STEPS = 3, 10


@dataclass
class StepClock:
    """Times optimizer steps, from one's end to the next one's.

    `report` is called once, on every rank at the same step, with the median seconds of the measured
    steps (0 if none could be measured) and the peak bytes of this rank.
    """

    report: Callable[[float, int], None]
    durations: list[float] = field(default_factory=list)
    last_end: float | None = None
    steps: int = 0

    def call(self, training: bool) -> None:
        """Note a call of the model; evaluation between two steps does not count as step time."""
        if not training:
            self.last_end = None

    def step(self, boundary: bool) -> None:
        """Note the end of an optimizer step."""
        if not boundary or self.steps > WARM_UP_STEPS + MEASURED_STEPS:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self.last_end is not None and self.steps > WARM_UP_STEPS:
            self.durations.append(now - self.last_end)
        self.last_end = now
        self.steps += 1
        if self.steps > WARM_UP_STEPS + MEASURED_STEPS:
            measured = sorted(self.durations)
            self.report(measured[len(measured) // 2] if measured else 0.0, peak_bytes())


def peak_bytes() -> int:
    """Peak memory of this rank: of its GPU, or of the whole process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)


def base_bytes(model: nn.Module) -> int:
    """What a process without a GPU held before training: interpreter and libraries, not the model.

    Its peak less this is what a plan's memory stands for. On a GPU nothing but training is counted.
    """
    if torch.cuda.is_available():
        return 0
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    return max(0, psutil.Process().memory_info().rss - held)

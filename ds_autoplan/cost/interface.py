"""What a search asks of a cost model. Times in seconds, sizes in bytes, per rank.

A cost model is built once per (graph, topology, workload) and answers three questions: what one layer
costs under one strategy, what the ends (embedding, head) cost, and what a whole assignment of layers to
stages costs. The search composes the first two into bounds and optima; the third re-costs every plan
before it is believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ds_autoplan.strategy import Degrees, Strategy


@dataclass(frozen=True)
class LayerCost:
    """One layer (or one end of the model) on one rank.

    Times are per micro-batch, exposed time only. `*_per_step` times are paid once per optimizer step.
    """

    forward_s: float
    backward_s: float
    communication_s: float  # the part of forward_s + backward_s that is exposed tp/cp/ep traffic
    gradient_bytes_reduced: float  # bytes that the data-parallel group reduces per step, per rank
    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float  # kept from forward to backward, per micro-batch in flight
    workspace_bytes: float  # transient peak while the layer runs (recomputation included)

    @property
    def state_bytes(self) -> float:
        """Bytes that do not depend on micro-batches in flight."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class StageAssignment:
    """Layers `first`..`last` (both included) with one strategy each."""

    first: int
    last: int
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class StageEstimate:
    """Price of one stage: time of one micro-batch (forward + backward) and itemised bytes per rank."""

    time_s: float
    memory: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes per rank at the peak."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class StepEstimate:
    """Price of a whole step."""

    step_s: float
    breakdown_s: dict[str, float]  # compute, tp, pp, dp, cp, ep, bubble, optimizer, ...
    stages: tuple[StageEstimate, ...]
    uncalibrated_fraction: float
    range_s: tuple[float, float] = (0.0, 0.0)
    assumptions: tuple[str, ...] = field(default=())


class CostModel(Protocol):
    """See the module's docstring."""

    def layer(self, block_class: int, strategy: Strategy, degrees: Degrees) -> LayerCost:
        """Price one block of class `block_class`."""

    def embedding(self, degrees: Degrees, vocabulary: str, sequence_parallel: bool) -> LayerCost:
        """Price everything before the first block, on the first stage."""

    def head(self, degrees: Degrees, vocabulary: str, sequence_parallel: bool) -> LayerCost:
        """Price final norm, head and loss, on the last stage."""

    def in_flight(self, stage: int, degrees: Degrees) -> float:
        """Micro-batches whose activations `stage` keeps at its peak (1F1B, interleaved, GPipe)."""

    def boundary_s(self, degrees: Degrees, strategy: Strategy) -> float:
        """Exposed time of sending one micro-batch's hidden states, and their gradient back."""

    def relayout_s(self, before: Strategy, after: Strategy, degrees: Degrees) -> float:
        """Time to convert hidden states, and their gradient, between neighbouring layers."""

    def fixed_bytes(self, degrees: Degrees) -> float:
        """Bytes per rank that no layer causes: context, communication buffers, fragmentation."""

    def step(
        self, degrees: Degrees, stages: tuple[StageAssignment, ...], vocabulary: str
    ) -> StepEstimate:
        """Price a whole assignment."""

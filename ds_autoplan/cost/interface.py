"""What a search asks of a cost model. Times in seconds, sizes in bytes, per rank.

A cost model is built once per (graph, topology, workload) and answers three questions: what one
layer costs under one strategy, what the ends (embedding, head) cost, and what a whole assignment of
layers to stages costs. The search composes the first two into bounds and optima; the third re-costs
every plan before it is believed.

The search minimises exactly what `step` must return, so that both agree to rounding. With passes a
(gradient_accumulation_steps: one pipeline pass per engine call; 1 under the megatron backend),
m = num_micro_batches and stages s:

    T_s    = sum of its layers' (forward_s + backward_s) + embedding on the first stage + head on
             the last + boundary_s for the cut after it (none after the last) + relayout_s between
             layers
    R_s    = sum of per_step_s of the same parts
    step_s = a * sum_s(T_s) / vpp + (m - a / vpp) * max_s(T_s) + max_s(R_s) + step_constant_s
    peak_s = sum(state_bytes) + in_flight(s) * (sum(activation_bytes) + b) + max(workspace_bytes)
             + fixed_bytes + B with (b, B) = stage_buffers(s), and peak_s <= capacity_bytes

Per-step times are therefore affine in bytes: reduce-scatters run bucket by bucket, so their
bandwidth is the bucket's, and what a schedule hides is a stated share of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ds_autoplan.strategy import Degrees, Strategy


@dataclass(frozen=True)
class LayerCost:
    """One layer (or one end of the model) on one rank.

    Times are per micro-batch, exposed time only. `*_per_step` times are paid once per optimizer
    step.
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
    per_step_s: float = 0.0  # once per step: exposed gradient reduction, optimizer update

    @property
    def state_bytes(self) -> float:
        """Bytes that do not depend on micro-batches in flight."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class StageAssignment:
    """The layers of one stage in the order in which they run, with one strategy each."""

    layers: tuple[int, ...]
    strategies: tuple[Strategy, ...]


@dataclass(frozen=True)
class StageEstimate:
    """Price of one stage: seconds of one micro-batch, both ways, and itemised bytes per rank."""

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

    def boundary_s(
        self, degrees: Degrees, strategy: Strategy, elements_per_token: float | None = None
    ) -> float:
        """Exposed time of sending one micro-batch's hidden states, and their gradient back.

        `elements_per_token` replaces the hidden size where a cut also carries skip edges.
        """

    def relayout_s(self, before: Strategy, after: Strategy, degrees: Degrees) -> float:
        """Time to convert hidden states, and their gradient, between neighbouring layers."""

    def fixed_bytes(self, degrees: Degrees) -> float:
        """Bytes per rank that no layer causes: context, communication buffers, fragmentation."""

    def stage_buffers(
        self, degrees: Degrees, stage: int, sequence_parallel: bool
    ) -> tuple[float, float]:
        """Hidden states kept between stages: (bytes per micro-batch in flight, bytes for good)."""

    def step_constant_s(self, degrees: Degrees) -> float:
        """Once per step whatever the cut: latencies, norm all-reduce, tied-embedding all-reduce."""

    def capacity_bytes(self) -> float:
        """Memory of one device as its driver reports it, before any reserve the user asks for."""

    def peak_flops(self) -> float:
        """FLOP/s of one device at the workload's precision, as its vendor states it (for MFU)."""

    def step(
        self, degrees: Degrees, stages: tuple[StageAssignment, ...], vocabulary: str
    ) -> StepEstimate:
        """Price a whole assignment."""

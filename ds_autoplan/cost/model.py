"""The analytic cost model: prices layers, ends and whole assignments; see interface.py for the sum.

Instances are pure functions of (graph, topology, workload) with a private cache: a search asks for
the same block under the same strategy many times.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_autoplan.cluster.collectives import point_to_point_s
from ds_autoplan.cluster.topology import Topology
from ds_autoplan.cost import constants as fitted
from ds_autoplan.cost.constants import Constants
from ds_autoplan.cost.ends import embedding_cost, head_cost, send_s
from ds_autoplan.cost.frameworks import BY_BACKEND, Framework
from ds_autoplan.cost.interface import LayerCost, StageAssignment, StageEstimate, StepEstimate
from ds_autoplan.cost.kernels import kernels_for
from ds_autoplan.cost.layer import Work, block_cost, block_work
from ds_autoplan.cost.overhead import overhead_bytes, stage_buffers
from ds_autoplan.cost.ranges import UNCALIBRATED_SPREAD, Spread, nearest_spread
from ds_autoplan.cost.setting import Detail, Setting
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload

MEMORY_KEYS = ("parameters", "gradients", "optimizer", "activations", "workspace", "overhead")


@dataclass(frozen=True)
class _Stage:
    """Sums over one stage: time of a micro-batch, per-step time, traffic, memory."""

    time_s: float
    per_step_s: float
    boundary_s: float
    detail: Detail
    memory: dict[str, int]


class AnalyticCostModel:
    """Implements :class:`~ds_autoplan.cost.interface.CostModel`.

    Args:
        graph: the folded model.
        topology: the cluster.
        workload: batch, sequence, precision, optimizer, backend.
        framework: the engine's behaviour; None takes the backend's.
        constants: the fitted constants.
        volume_only: price traffic by volume over the fastest link (the baseline of `--cost
            volume`).
        shard_group: ranks that ZeRO shards over; 0: all that hold the same parameters.
    """

    def __init__(
        self,
        graph: BlockGraph,
        topology: Topology,
        workload: Workload,
        framework: Framework | None = None,
        constants: Constants = fitted.DEFAULT,
        volume_only: bool = False,
        shard_group: int = 0,
    ) -> None:
        """Build the model; raises UnsupportedError for a precision the device lacks."""
        self.graph = graph
        self.topology = topology
        self.workload = workload
        self.framework = framework or BY_BACKEND[workload.backend]
        self.setting = Setting(
            topology=topology,
            workload=workload,
            framework=self.framework,
            kernels=kernels_for(
                topology.device,
                workload.precision,
                constants,
                self.framework.attention,
                topology.calibrated,
            ),
            constants=constants,
            hidden=graph.hidden_size,
            model_type=graph.model_type,
            volume_only=volume_only,
            shard_group=shard_group or self.framework.default_shard_group,
        )
        self._blocks: dict[tuple[int, Strategy, Degrees], tuple[LayerCost, Detail]] = {}
        self._works: dict[tuple[object, ...], Work] = {}
        self._ends: dict[tuple[str, Degrees, str, bool], tuple[LayerCost, Detail]] = {}

    def layer(self, block_class: int, strategy: Strategy, degrees: Degrees) -> LayerCost:
        """Price one block of class `block_class`."""
        return self._block(block_class, strategy, degrees)[0]

    def embedding(self, degrees: Degrees, vocabulary: str, sequence_parallel: bool) -> LayerCost:
        """Price everything before the first block, on the first stage."""
        return self._end("embedding", degrees, vocabulary, sequence_parallel)[0]

    def head(self, degrees: Degrees, vocabulary: str, sequence_parallel: bool) -> LayerCost:
        """Price final norm, head and loss, on the last stage."""
        return self._end("head", degrees, vocabulary, sequence_parallel)[0]

    def in_flight(self, stage: int, degrees: Degrees) -> float:
        """Micro-batches whose activations `stage` keeps at its peak (1F1B, interleaved)."""
        per_pass = max(1.0, degrees.num_micro_batches / self._passes())
        if degrees.pp == 1:
            return 1.0
        if degrees.vpp == 1:
            return min(per_pass, float(degrees.pp - stage))
        chunks = 2 * (degrees.pp - stage - 1) + (degrees.vpp - 1) * degrees.pp + 1
        return min(per_pass, chunks / degrees.vpp)

    def boundary_s(
        self, degrees: Degrees, strategy: Strategy, elements_per_token: float | None = None
    ) -> float:
        """Exposed time of sending one micro-batch's hidden states, and their gradient back."""
        if degrees.pp == 1:
            return 0.0
        width = self.graph.hidden_size if elements_per_token is None else elements_per_token
        exchange = send_s(self.setting, degrees, width, strategy.sequence_parallel)
        return exchange * (4.0 if self.framework.blocking_sends else 2.0)

    def relayout_s(self, before: Strategy, after: Strategy, degrees: Degrees) -> float:
        """Time to convert hidden states, and their gradient, between neighbouring layers.

        Into or out of sequence parallelism: a gather in one direction, a free slice in the other.
        """
        if degrees.tp == 1 or before.sequence_parallel == after.sequence_parallel:
            return 0.0
        stream = self.setting.tokens(degrees) * self.graph.hidden_size * self.setting.element
        return self.setting.collective("all_gather", stream, degrees, "tp")

    def fixed_bytes(self, degrees: Degrees) -> float:
        """Bytes per rank that no layer causes: context, communication buffers."""
        return overhead_bytes(
            self.graph, self.topology, self.workload.precision, self.framework, degrees
        )

    def stage_buffers(
        self, degrees: Degrees, stage: int, sequence_parallel: bool
    ) -> tuple[float, float]:
        """Hidden states kept between stages: (bytes per micro-batch in flight, bytes for good)."""
        stream = self.setting.tokens(degrees) * self.graph.hidden_size * self.setting.element
        if sequence_parallel:
            stream /= degrees.tp
        return stage_buffers(self.framework, degrees, stage, stream)

    def step_constant_s(self, degrees: Degrees) -> float:
        """Once per step whatever the cut: host work, gradient norm, tied-embedding all-reduce."""
        total = self.framework.step_overhead_s
        total += self.setting.collective("all_reduce", 8.0, degrees, "dp")
        if degrees.zero_stage in (1, 2):
            shards = min(self.setting.shard_group or degrees.dp, degrees.dp)
            total += shards * self.framework.broadcast_s
        if degrees.pp > 1 and self.graph.tied:
            weights = self.graph.vocab_size * self.graph.hidden_size / degrees.tp
            bytes_ = weights * (self.framework.gradient_bytes or self.setting.element)
            stride = self.topology.axis_stride(degrees, "pp") * (degrees.pp - 1)
            total += 2.0 * point_to_point_s(self.topology, bytes_, stride)
        return total

    def capacity_bytes(self) -> float:
        """Memory of one device as its driver reports it."""
        return float(self.topology.device.memory_bytes)

    def peak_flops(self) -> float:
        """FLOP/s of one device at the workload's precision, as its vendor states it."""
        flops = self.topology.device.peak_flops
        return flops.get(self.workload.precision) or flops["bf16"]

    def step(
        self, degrees: Degrees, stages: tuple[StageAssignment, ...], vocabulary: str
    ) -> StepEstimate:
        """Price a whole assignment; the sum is the one interface.py states."""
        priced = [
            self._stage(index, stage, stages, degrees, vocabulary)
            for index, stage in enumerate(stages)
        ]
        passes = self._passes()
        times = [stage.time_s for stage in priced]
        slowest = max(range(len(priced)), key=lambda index: times[index])
        steady = (degrees.num_micro_batches - passes / degrees.vpp) * times[slowest]
        fill = passes * sum(times) / degrees.vpp
        per_step = max(stage.per_step_s for stage in priced)
        constant = self.step_constant_s(degrees)
        step_s = fill + steady + per_step + constant
        worst = priced[slowest]
        micro = degrees.num_micro_batches
        dp_s = max(stage.detail.dp_s for stage in priced)
        breakdown = {
            "tp": micro * worst.detail.tp_s,
            "cp": micro * worst.detail.cp_s,
            "ep": micro * worst.detail.ep_s,
            "pp": micro * (worst.boundary_s + worst.detail.pp_s),
            "dp": dp_s + micro * worst.detail.zero3_s,
            "bubble": fill + steady - micro * times[slowest],
            "optimizer": per_step - dp_s,
            "constant": constant,
        }
        breakdown["compute"] = step_s - sum(breakdown.values())
        uncalibrated = self._uncalibrated(breakdown, step_s)
        low, high = self._range(uncalibrated)
        return StepEstimate(
            step_s=step_s,
            breakdown_s=breakdown,
            stages=tuple(StageEstimate(stage.time_s, stage.memory) for stage in priced),
            uncalibrated_fraction=uncalibrated,
            range_s=(step_s * low, step_s * high),
            assumptions=self._assumptions(),
        )

    def _passes(self) -> int:
        if self.workload.backend == "deepspeed":
            return max(1, self.workload.gradient_accumulation_steps or 1)
        return 1

    def _block(
        self, block_class: int, strategy: Strategy, degrees: Degrees
    ) -> tuple[LayerCost, Detail]:
        key = (block_class, strategy, degrees)
        found = self._blocks.get(key)
        if found is None:
            found = block_cost(self.setting, self._work(block_class, strategy, degrees), degrees)
            self._blocks[key] = found
        return found

    def _work(self, block_class: int, strategy: Strategy, degrees: Degrees) -> Work:
        d = degrees
        key = (block_class, strategy, d.tp, d.cp, d.ep, d.micro_batch_size, d.order)
        found = self._works.get(key)
        if found is None:
            found = block_work(self.setting, self.graph.classes[block_class], strategy, degrees)
            self._works[key] = found
        return found

    def _end(
        self, end: str, degrees: Degrees, vocabulary: str, sequence_parallel: bool
    ) -> tuple[LayerCost, Detail]:
        key = (end, degrees, vocabulary, sequence_parallel)
        found = self._ends.get(key)
        if found is None:
            price = embedding_cost if end == "embedding" else head_cost
            found = price(self.setting, self.graph, degrees, vocabulary, sequence_parallel)
            self._ends[key] = found
        return found

    def _stage(
        self,
        index: int,
        stage: StageAssignment,
        stages: tuple[StageAssignment, ...],
        degrees: Degrees,
        vocabulary: str,
    ) -> _Stage:
        strategies = stage.strategies
        parts = [
            self._block(self.graph.layers[layer], strategy, degrees)
            for layer, strategy in zip(stage.layers, strategies, strict=True)
        ]
        sequence = [strategy.sequence_parallel for strategy in strategies]
        if index == 0:
            parts.append(self._end("embedding", degrees, vocabulary, sequence[0]))
        boundary = 0.0
        if index == len(stages) - 1:
            parts.append(self._end("head", degrees, vocabulary, sequence[-1]))
        else:
            crossing = sum(self.graph.cut_after(stage.layers[-1]))
            boundary = self.boundary_s(degrees, strategies[-1], crossing)
        relayout = sum(
            self.relayout_s(before, after, degrees)
            for before, after in zip(strategies, strategies[1:], strict=False)
        )
        costs = [cost for cost, _ in parts]
        details = [detail for _, detail in parts]
        time_s = sum(c.forward_s + c.backward_s for c in costs) + boundary + relayout
        in_flight = self.in_flight(index, degrees)
        skipped = self.graph.cut_elements[stage.layers[0]][1] if index else 0.0
        carried = skipped * self.setting.tokens(degrees) * self.setting.element
        sent, held = self.stage_buffers(degrees, index, sequence[-1])
        amounts = (
            sum(c.parameter_bytes for c in costs),
            sum(c.gradient_bytes for c in costs),
            sum(c.optimizer_bytes for c in costs),
            in_flight * (carried + sent + sum(c.activation_bytes for c in costs)),
            max(c.workspace_bytes for c in costs),
            self.fixed_bytes(degrees) + held,
        )
        return _Stage(
            time_s=time_s,
            per_step_s=sum(c.per_step_s for c in costs),
            boundary_s=boundary,
            detail=Detail(
                sum(d.tp_s for d in details) + relayout,
                sum(d.cp_s for d in details),
                sum(d.ep_s for d in details),
                sum(d.zero3_s for d in details),
                sum(d.dp_s for d in details),
                sum(d.pp_s for d in details),
            ),
            memory={key: round(value) for key, value in zip(MEMORY_KEYS, amounts, strict=True)},
        )

    def _uncalibrated(self, breakdown: dict[str, float], step_s: float) -> float:
        if self.topology.calibrated:
            return 0.0
        compute = breakdown["compute"] + breakdown["bubble"] + breakdown["optimizer"]
        loose = 0.0 if self.setting.kernels.calibrated else compute
        source = self.topology.device.source
        if "estimate" in source or "scaled" in source or "rough" in source:
            loose += sum(breakdown[key] for key in ("tp", "cp", "ep", "pp", "dp"))
        return min(1.0, loose / step_s) if step_s > 0 else 0.0

    def _range(self, uncalibrated: float) -> tuple[float, float]:
        """Factors on the step time between which nine of ten measured runs would lie."""
        spread = self._spread().half_width + UNCALIBRATED_SPREAD * uncalibrated
        return 1.0 / (1.0 + spread), 1.0 + spread

    def _spread(self) -> Spread:
        mixture = any(block.mlp and block.mlp.num_experts for block in self.graph.classes)
        device = self.topology.device
        return nearest_spread(
            self.framework.name, device.architecture, self.workload.precision, mixture
        )

    def _assumptions(self) -> tuple[str, ...]:
        framework = self.framework
        hidden = "hides under backward" if framework.gradient_overlap else "is fully exposed"
        return (
            f"gradient reduction {hidden} ({framework.name})",
            f"{framework.tp_overlap:.0%} of tensor-parallel traffic hides under GEMMs",
            "all groups of an axis communicate at the same time and share the NICs",
            f"range from the nearest measured runs ({self._spread().family})",
        )

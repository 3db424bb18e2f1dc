"""From a candidate and a cost model to a stage problem.

The prices are exactly those of cost/interface.py; this module only files them: a layer's forward_s
+ backward_s becomes its choice's time, ends and fixed bytes go to their stages, and every cut
carries the skip edges that cross it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ds_autoplan.cost.interface import CostModel, LayerCost
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.search.problem import Choice, Problem, Stage, lower_bound, missing_bytes, pareto
from ds_autoplan.search.space import Candidate, passes_of, stage_order, strategies
from ds_autoplan.strategy import CHECKPOINTING, Strategy
from ds_autoplan.workload import Workload

_BYTES = {"fp32": 4.0}


class Pricer:
    """Prices the candidates of one planning job.

    Args:
        graph: the model.
        cost: the cost model, built for the same graph and workload.
        workload: the job.
        options: pins and limits.
        capacity_bytes: what a device may hold, the user's reserve already taken off.
    """

    def __init__(
        self,
        graph: BlockGraph,
        cost: CostModel,
        workload: Workload,
        options: PlanOptions,
        capacity_bytes: float,
    ) -> None:
        """Keep the parts; nothing is priced yet."""
        self.graph = graph
        self.cost = cost
        self.workload = workload
        self.options = options
        self.capacity_bytes = capacity_bytes
        self.population = [graph.layers.count(index) for index in range(len(graph.classes))]
        self._missing: dict[Candidate, float] = {}
        self._times: dict[object, tuple[list[float], float, float]] = {}

    def quick_bound_s(self, candidate: Candidate) -> float:
        """A lower bound from prices that many candidates share; at most :meth:`bound_s`.

        Without ZeRO a layer's forward and backward do not depend on dp or pp, and ZeRO only adds
        to them, so candidates that share tp, cp, ep and micro-batch share these prices.
        """
        d = candidate.degrees
        key = (d.tp, d.cp, d.ep, d.micro_batch_size, candidate.sequence_parallel)
        if key not in self._times:
            self._times[key] = self._shared_times(candidate)
        layers_s, first_s, last_s = self._times[key]
        total = sum(n * t for n, t in zip(self.population, layers_s, strict=True))
        total += first_s + last_s
        sum_weight = passes_of(self.workload) / d.vpp
        longest = max(first_s, last_s) + min(layers_s)
        return sum_weight * total + (d.num_micro_batches - sum_weight) * max(total / d.pp, longest)

    def _shared_times(self, candidate: Candidate) -> tuple[list[float], float, float]:
        plain = replace(candidate.degrees, zero_stage=0)
        lightest = self._lightest()
        times = []
        for index, block in enumerate(self.graph.classes):
            prices = [
                self.cost.layer(index, strategy, plain)
                for strategy in strategies(block, candidate, self.options)
                if strategy.activation_checkpointing == lightest
            ]
            times.append(min(price.forward_s + price.backward_s for price in prices))
        parallel = candidate.sequence_parallel
        first = self.cost.embedding(plain, candidate.vocabulary, parallel)
        last = self.cost.head(plain, candidate.vocabulary, parallel)
        return times, first.forward_s + first.backward_s, last.forward_s + last.backward_s

    def _lightest(self) -> str:
        allowed = self.options.allows
        return next(name for name in CHECKPOINTING if allowed("activation_checkpointing", name))

    def bound_s(self, candidate: Candidate) -> float:
        """A lower bound on the step: no memory limit, perfect balance, least checkpointing.

        Checkpointing never makes a layer faster, so only its lightest allowed form is priced.
        """
        return lower_bound(self._problem(candidate, (self._lightest(),)))

    def missing_bytes(self, candidate: Candidate) -> float:
        """Bytes per device that the candidate misses at the very least; 0 or less: it may fit.

        Checkpointing and sharding never make a layer bigger, so only the heaviest allowed
        checkpointing of the first sharding is priced.
        """
        if candidate in self._missing:
            return self._missing[candidate]
        smallest = [
            (
                self._choice(
                    index, strategies(block, candidate, self.options)[self._heaviest()], candidate
                ),
            )
            for index, block in enumerate(self.graph.classes)
        ]
        self._missing[candidate] = missing_bytes(self._with_choices(candidate, smallest))
        return self._missing[candidate]

    def _heaviest(self) -> int:
        """Where the heaviest allowed checkpointing stands among a sharding's strategies."""
        allowed = self.options.allows
        return sum(allowed("activation_checkpointing", name) for name in CHECKPOINTING) - 1

    def problem(self, candidate: Candidate) -> Problem:
        """The candidate's stage problem with every strategy that is on a Pareto front."""
        return self._problem(candidate, CHECKPOINTING)

    def _problem(self, candidate: Candidate, checkpointing: tuple[str, ...]) -> Problem:
        choices = []
        for index, block in enumerate(self.graph.classes):
            options = [
                self._choice(index, strategy, candidate)
                for strategy in strategies(block, candidate, self.options)
                if strategy.activation_checkpointing in checkpointing
            ]
            choices.append(pareto(options))
        return self._with_choices(candidate, choices)

    def _with_choices(self, candidate: Candidate, choices: Sequence[tuple[Choice, ...]]) -> Problem:
        degrees = candidate.degrees
        passes = passes_of(self.workload)
        gpipe = self.options.schedule == "gpipe" and degrees.pp > 1
        order = stage_order(self.graph.num_layers, degrees)
        cut_time, carried = self._cuts(candidate, order)
        return Problem(
            layers=tuple(self.graph.layers[at] for at in order),
            choices=tuple(choices),
            stages=self._stages(candidate, gpipe),
            sum_weight=passes / degrees.vpp,
            max_weight=degrees.num_micro_batches - passes / degrees.vpp,
            constant_s=self.cost.step_constant_s(degrees),
            cut_time_s=cut_time,
            carried_bytes=carried,
        )

    def _choice(self, index: int, strategy: Strategy, candidate: Candidate) -> Choice:
        price = self.cost.layer(index, strategy, candidate.degrees)
        return Choice(
            price.forward_s + price.backward_s,
            price.state_bytes,
            price.activation_bytes,
            price.workspace_bytes,
            price.per_step_s,
            strategy,
        )

    def _stages(self, candidate: Candidate, gpipe: bool) -> tuple[Stage, ...]:
        degrees = candidate.degrees
        fixed = self.cost.fixed_bytes(degrees)
        parallel = candidate.sequence_parallel
        stages = []
        for index in range(degrees.pp):
            ends: list[LayerCost] = []
            if index == 0:
                ends.append(self.cost.embedding(degrees, candidate.vocabulary, parallel))
            if index == degrees.pp - 1:
                ends.append(self.cost.head(degrees, candidate.vocabulary, parallel))
            in_flight = self.cost.in_flight(index, degrees)
            if gpipe:
                in_flight = degrees.num_micro_batches / passes_of(self.workload)
            sent, held = self.cost.stage_buffers(degrees, index, parallel)
            stages.append(
                Stage(
                    capacity_bytes=self.capacity_bytes,
                    in_flight=in_flight,
                    time_s=sum(end.forward_s + end.backward_s for end in ends),
                    per_step_s=sum(end.per_step_s for end in ends),
                    state_bytes=fixed + held + sum(end.state_bytes for end in ends),
                    activation_bytes=sent + sum(end.activation_bytes for end in ends),
                    workspace_bytes=max([0.0, *(end.workspace_bytes for end in ends)]),
                )
            )
        return tuple(stages)

    def _cuts(
        self, candidate: Candidate, order: tuple[int, ...]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Seconds of, and bytes carried over, the cut before each place of `order`."""
        degrees = candidate.degrees
        if degrees.pp == 1:
            return (), ()
        strategy = Strategy(sequence_parallel=candidate.sequence_parallel)
        element = _BYTES.get(self.workload.precision, 2.0)
        tokens = degrees.micro_batch_size * self.workload.seq_length / degrees.cp
        cuts = self.graph.cut_elements[1:]
        priced = {
            cut: self.cost.boundary_s(degrees, strategy, sum(cut)) for cut in dict.fromkeys(cuts)
        }
        ends = starts = cuts
        if degrees.vpp > 1:  # a stage ends after its last chunk and starts with its first
            ends = tuple(self.graph.cut_after(at) for at in order[:-1])
            starts = tuple(self.graph.cut_elements[at] for at in order[1:])
        times = (0.0, *(priced[cut] for cut in ends))
        if not any(skipped for _, skipped in priced):
            return times, ()
        return times, (0.0, *(tokens * skipped * element for _, skipped in starts))

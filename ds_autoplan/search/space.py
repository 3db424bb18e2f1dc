"""The space of candidates: degrees and micro-batch sizes, each exclusion with its reason.

With world size W and global batch size B, a candidate has tp * pp * cp * dp = W, dp dividing B, and
a micro-batch size b dividing the samples that one pipeline pass brings to a replica: B / (dp * a)
for a engine calls per step (a = 1 unless the script says otherwise). Then num_micro_batches = B /
(dp * b).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ds_autoplan.model.graph import BlockClass, BlockGraph
from ds_autoplan.search.options import PlanOptions
from ds_autoplan.strategy import CHECKPOINTING, DEFAULT_ORDER, Degrees, Strategy
from ds_autoplan.workload import Workload

# Above this many tokens per micro-batch GEMMs are as efficient as they get (they saturate near
# 8,192 rows on every device in the cost data) and a larger one only costs memory. Pins overrule it.
MOST_MICRO_BATCH_TOKENS = 65536
# Below this a context-parallel rank's attention is too short to hide the exchange of keys and
# values. Pins overrule it.
LEAST_CP_TOKENS = 2048
_INTERLEAVINGS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
_ORDERS = (DEFAULT_ORDER, "tp-cp-ep-pp-dp")


@dataclass(frozen=True)
class Candidate:
    """Everything that is fixed before layers are looked at."""

    degrees: Degrees
    sequence_parallel: bool
    vocabulary: str

    @property
    def group(self) -> tuple[int, ...]:
        """What makes two candidates different plans and not variants of one."""
        degrees = self.degrees
        return (degrees.tp, degrees.pp, degrees.dp, degrees.cp, degrees.ep, degrees.vpp)

    @property
    def simplicity(self) -> tuple[Any, ...]:
        """Of plans that cost the same the one that is least parallel comes first."""
        d = self.degrees
        return (
            d.pp * d.tp * d.cp,
            d.pp,
            d.tp,
            d.vpp,
            d.ep,
            d.zero_stage,
            self.sequence_parallel,
            d.order != DEFAULT_ORDER,
            d.micro_batch_size,
            self.vocabulary,
        )


@dataclass
class Space:
    """The candidates, and what was left out: partial candidate -> reason, in order of discovery."""

    candidates: list[Candidate] = field(default_factory=list)
    excluded: dict[tuple[tuple[str, Any], ...], str] = field(default_factory=dict)

    def exclude(self, reason: str, **candidate: Any) -> None:
        """Record why a (partly specified) candidate is not looked at."""
        self.excluded.setdefault(tuple(candidate.items()), reason)

    def reasons(self, pins: Mapping[str, Sequence[Any]]) -> list[str]:
        """Why nothing with these pins is left, without what excludes other settings only.

        Reasons that speak of nothing but pinned values come alone, where there are any.
        """
        close = {
            candidate: reason
            for candidate, reason in self.excluded.items()
            if all(_may_be(value, pins.get(name)) for name, value in candidate)
        }
        decisive = [
            reason
            for candidate, reason in close.items()
            if all(name in pins for name, _ in candidate)
        ]
        return list(dict.fromkeys(decisive or close.values() or self.excluded.values()))

    def exclusions(self) -> list[dict[str, Any]]:
        """The exclusions as plain data."""
        return [
            {"candidate": dict(candidate), "reason": reason}
            for candidate, reason in self.excluded.items()
        ]


def _may_be(excluded: Any, pinned: Sequence[Any] | None) -> bool:
    """Whether a pinned value is among the excluded ones: a value, several, or ">16"."""
    if pinned is None:
        return True
    if isinstance(excluded, str) and excluded.startswith(">"):
        return any(value > int(excluded[1:]) for value in pinned)
    several = excluded if isinstance(excluded, tuple | list) else (excluded,)
    return any(value in several for value in pinned)


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def enumerate_space(
    graph: BlockGraph, world: int, workload: Workload, options: PlanOptions
) -> Space:
    """All candidates of a job on `world` devices that pins, model and backend allow."""
    space = Space()
    _note_impossible_pins(space, world, options, workload.backend)
    for tp in divisors(world):
        if not _tp_allowed(space, graph, tp, options):
            continue
        for pp in divisors(world // tp):
            if not _pp_allowed(space, graph, pp, workload, options):
                continue
            for cp in _cp_values(space, world // (tp * pp), workload, options):
                dp = world // (tp * pp * cp)
                if options.allows("dp", dp) and _dp_allowed(space, dp, workload):
                    space.candidates += _with_degrees(
                        space, graph, workload, options, (tp, pp, cp, dp)
                    )
    return space


def _note_impossible_pins(space: Space, world: int, options: PlanOptions, backend: str) -> None:
    for name in ("tp", "pp", "dp", "cp"):
        for value in options.pins.get(name, ()):
            if world % value:
                space.exclude(
                    f"{name}={value} does not divide the {world} devices", **{name: value}
                )
    axes = ("tp", "pp", "dp") if backend == "deepspeed" else ("tp", "pp", "dp", "cp")
    pinned = [name for name in (*axes[:3], "cp") if name in options.pins]
    free = any(name not in options.pins for name in axes)
    products = [prod(each) for each in itertools.product(*(options.pins[n] for n in pinned))]
    if not any(world % each == 0 if free else world == each for each in products):
        named = ", ".join(
            f"{name}={' or '.join(str(value) for value in options.pins[name])}" for name in pinned
        )
        space.exclude(
            f"tp * pp * dp * cp must be the {world} devices, which no choice of {named} allows",
            **{name: options.pins[name][0] for name in pinned if len(options.pins[name]) == 1},
        )


def shardable(block: BlockClass, tp: int) -> tuple[bool, bool]:
    """Whether attention (by heads) and MLP (by width) of a block may be split over tp.

    Key-value heads that are fewer than tp, or do not divide, are replicated where needed: legal.
    """
    attention = mlp = False
    if block.attention is not None and "attention" in block.shardable:
        attention = block.attention.num_heads % tp == 0
        if block.cross_attention is not None:
            attention = attention and block.cross_attention.num_heads % tp == 0
    if block.mlp is not None and "mlp" in block.shardable:
        mlp = block.mlp.intermediate_size % tp == 0
        mlp = mlp and block.mlp.shared_intermediate_size % tp == 0
    return attention, mlp


def strategies(
    block: BlockClass, candidate: Candidate, options: PlanOptions
) -> tuple[Strategy, ...]:
    """What one block may do under a candidate, pins applied where they are legal."""
    tp = candidate.degrees.tp
    heads, shard = shardable(block, tp)
    attention = ["heads", "replicate"] if heads else ["replicate"]
    mlp = ["shard", "replicate"] if shard else ["replicate"]
    if tp == 1:
        attention, mlp = ["heads"], ["shard"]
    attention = [value for value in attention if options.allows("attention", value)] or attention
    mlp = [value for value in mlp if options.allows("mlp", value)] or mlp
    return tuple(
        Strategy(a, m, candidate.sequence_parallel, checkpointing)
        for a in attention
        for m in mlp
        for checkpointing in CHECKPOINTING
        if options.allows("activation_checkpointing", checkpointing)
    )


def _tp_allowed(space: Space, graph: BlockGraph, tp: int, options: PlanOptions) -> bool:
    if not options.allows("tp", tp):
        return False
    if tp == 1:
        return True
    if not options.tensor_parallel or options.ablation == "inter":
        space.exclude("tensor parallelism is switched off", tp=tp)
        return False
    if graph.tensor_refusal:
        space.exclude(graph.tensor_refusal, tp=tp)
        return False
    if not any(any(shardable(block, tp)) for block in graph.classes):
        block = graph.classes[0]
        heads = block.attention.num_heads if block.attention else 0
        width = block.mlp.intermediate_size if block.mlp else 0
        space.exclude(
            f"tp={tp} divides neither the {heads} attention heads nor the MLP width {width}", tp=tp
        )
        return False
    return True


def _pp_allowed(
    space: Space, graph: BlockGraph, pp: int, workload: Workload, options: PlanOptions
) -> bool:
    if not options.allows("pp", pp):
        return False
    if pp == 1:
        return True
    reason = ""
    if not options.pipeline or options.ablation == "intra":
        reason = "pipeline parallelism is switched off"
    elif pp > graph.num_layers:
        reason = f"pp={pp} needs at least {pp} layers, the model has {graph.num_layers}"
    elif graph.pipeline_refusal:
        reason = graph.pipeline_refusal
    elif workload.backend == "deepspeed" and any(e.elements_per_token for e in graph.skip_edges):
        reason = (
            "the deepspeed backend sends only hidden states between stages, and this model has "
            "values that skip blocks (encoder output)"
        )
    if reason:
        space.exclude(reason, pp=pp)
    return not reason


def _cp_values(space: Space, rest: int, workload: Workload, options: PlanOptions) -> Iterator[int]:
    for cp in divisors(rest):
        if not options.allows("cp", cp):
            continue
        if cp > 1 and workload.backend == "deepspeed":
            if options.pins.get("cp"):
                space.exclude("the deepspeed backend has no context parallelism", cp=cp)
            continue
        if cp > 1 and workload.seq_length % (2 * cp):
            space.exclude(
                f"the sequence of {workload.seq_length} does not divide by 2 * cp = {2 * cp}", cp=cp
            )
            continue
        if cp > 1 and "cp" not in options.pins and workload.seq_length < LEAST_CP_TOKENS * cp:
            space.exclude(
                f"cp={cp} leaves less than {LEAST_CP_TOKENS} tokens of a sequence per rank", cp=cp
            )
            continue
        yield cp


def _dp_allowed(space: Space, dp: int, workload: Workload) -> bool:
    passes = passes_of(workload)
    if workload.global_batch_size % dp:
        space.exclude(
            f"the global batch of {workload.global_batch_size} does not divide over dp={dp}", dp=dp
        )
        return False
    if workload.global_batch_size % (dp * passes):
        space.exclude(
            f"the global batch of {workload.global_batch_size} does not divide over dp={dp} and "
            f"{passes} accumulation steps",
            dp=dp,
        )
        return False
    return True


def passes_of(workload: Workload) -> int:
    """Pipeline passes per optimizer step: engine calls under deepspeed, one under megatron."""
    if workload.backend == "deepspeed":
        return max(1, workload.gradient_accumulation_steps or 1)
    return 1


def _zero_stages(
    space: Space, tp: int, pp: int, dp: int, workload: Workload, options: PlanOptions
) -> list[int]:
    highest = 3
    if workload.backend == "megatron":
        highest = 1
        space.exclude(
            "the megatron backend has the distributed optimizer (1) and nothing above",
            zero_stage=(2, 3),
        )
    elif pp > 1:
        highest = 1
        space.exclude(
            "DeepSpeed's pipeline engine runs ZeRO stages 0 and 1 only", pp=pp, zero_stage=(2, 3)
        )
    lowest = 0
    halves = workload.precision in ("bf16", "fp16") and tp * pp > 1
    if halves and workload.backend == "deepspeed":
        lowest = 1
        space.exclude(
            "DeepSpeed without ZeRO takes a part of the 16-bit gradient norm under tp or pp",
            tp=tp,
            pp=pp,
            zero_stage=0,
        )
    allowed = range(lowest, highest + 1)
    stages = [stage for stage in allowed if options.allows("zero_stage", stage)]
    if "zero_stage" in options.pins:
        return stages
    return stages[:1] if dp == 1 else stages  # with dp 1 there is nothing to partition


def _micro_batch_sizes(
    space: Space, dp: int, workload: Workload, options: PlanOptions
) -> list[int]:
    samples = workload.global_batch_size // (dp * passes_of(workload))
    most = max(1, MOST_MICRO_BATCH_TOKENS // workload.seq_length)
    sizes = []
    for size in divisors(samples):
        if not options.allows("micro_batch_size", size):
            continue
        if size > most and "micro_batch_size" not in options.pins:
            space.exclude(
                f"micro-batches above {MOST_MICRO_BATCH_TOKENS} tokens only cost memory",
                micro_batch_size=f">{most}",
            )
            break
        sizes.append(size)
    for size in options.pins.get("micro_batch_size", ()):
        if samples % size:
            space.exclude(
                f"a pass brings {samples} samples to a replica, which micro_batch_size={size} "
                "does not divide",
                dp=dp,
                micro_batch_size=size,
            )
    return sizes


def _sequence_parallel(
    space: Space, graph: BlockGraph, tp: int, workload: Workload, options: PlanOptions
) -> list[bool]:
    values = [value for value in (False, True) if options.allows("sequence_parallel", value)]
    if tp == 1:
        if values == [True]:
            space.exclude("sequence parallelism needs tp > 1", tp=1, sequence_parallel=True)
        return [False] if False in values else []
    if workload.seq_length % tp:
        space.exclude(
            f"the sequence of {workload.seq_length} does not divide by tp={tp}",
            tp=tp,
            sequence_parallel=True,
        )
        values = [value for value in values if not value]
    mixture = any(block.mlp is not None and block.mlp.num_experts for block in graph.classes)
    if mixture and workload.backend == "megatron" and False in values:
        space.exclude(
            "Megatron-core trains mixtures of experts under tp with sequence parallelism only",
            tp=tp,
            sequence_parallel=False,
        )
        values = [value for value in values if value]
    return values


def _expert_degrees(
    space: Space, graph: BlockGraph, dp: int, cp: int, workload: Workload, options: PlanOptions
) -> list[int]:
    ranks = dp * cp  # experts live inside dp and cp
    experts = [block.mlp.num_experts for block in graph.classes if block.mlp]
    most = min([count for count in experts if count] or [1])
    degrees = []
    for ep in options.pins.get("ep", ()):
        if ranks % ep:
            space.exclude(f"ep={ep} does not divide dp * cp = {ranks}", dp=dp, cp=cp, ep=ep)
    for ep in divisors(ranks):
        if not options.allows("ep", ep):
            continue
        if ep > 1 and (most == 1 or most % ep):
            if options.pins.get("ep"):
                space.exclude(f"ep={ep} does not divide the {most} experts", ep=ep)
            continue
        if ep > 1 and workload.backend == "deepspeed":
            space.exclude("the deepspeed backend has no expert parallelism", ep=ep)
            continue
        degrees.append(ep)
    return degrees


def interleaved_cut(layers: int, pp: int, vpp: int) -> tuple[int, int] | None:
    """Layers that (first, last) stage give up so that pp * vpp equal chunks come out.

    Megatron-core can count embedding and head as a layer each; None where that is not enough.
    """
    for first, last in ((0, 0), (0, 1), (1, 1)):
        chunk, rest = divmod(layers + first + last, pp * vpp)
        if rest == 0 and chunk * vpp > max(first, last):
            return first, last
    return None


def interleaved_bounds(layers: int, degrees: Degrees) -> tuple[int, ...] | None:
    """How many layers come before each stage, and all, where the stages' chunks are equal."""
    less = interleaved_cut(layers, degrees.pp, degrees.vpp)
    if less is None:
        return None
    each = (layers + sum(less)) // degrees.pp
    return (0, *(stage * each - less[0] for stage in range(1, degrees.pp)), layers)


def stage_order(layers: int, degrees: Degrees) -> tuple[int, ...]:
    """All layers, stage by stage: each stage's own in the order in which they run.

    Interleaved, stage s holds chunks s, s + pp, s + 2 pp ... of the chain.
    """
    less = interleaved_cut(layers, degrees.pp, degrees.vpp) if degrees.vpp > 1 else None
    if less is None:
        return tuple(range(layers))
    chunk = (layers + sum(less)) // (degrees.pp * degrees.vpp)
    return tuple(sorted(range(layers), key=lambda at: ((at + less[0]) // chunk % degrees.pp, at)))


def _interleavings(
    space: Space, graph: BlockGraph, pp: int, micro_batches: int, options: PlanOptions, backend: str
) -> list[int]:
    degrees = []
    wanted = options.pins.get("vpp")
    layers = graph.num_layers
    for vpp in wanted or ([1] if pp == 1 or backend == "deepspeed" else _INTERLEAVINGS):
        reason = ""
        if vpp > 1 and backend == "deepspeed":
            reason = "the deepspeed backend has no interleaved stages"
        elif vpp > 1 and pp == 1:
            reason = "interleaved stages need pp > 1"
        elif vpp > 1 and interleaved_cut(layers, pp, vpp) is None:
            reason = (
                f"{layers} layers do not divide into pp * vpp = {pp * vpp} equal chunks, nor with "
                "embedding and head counted as layers"
            )
        elif vpp > 1 and micro_batches % pp:
            reason = f"interleaving needs micro-batches in multiples of pp={pp}"
        if not reason:
            degrees.append(vpp)
        elif wanted or "divide into" in reason:
            space.exclude(reason, pp=pp, vpp=vpp)
    return degrees


def _with_degrees(
    space: Space,
    graph: BlockGraph,
    workload: Workload,
    options: PlanOptions,
    grid: tuple[int, int, int, int],
) -> Iterator[Candidate]:
    """The candidates of one (tp, pp, cp, dp): ZeRO stage, micro-batch, interleaving, order."""
    tp, pp, cp, dp = grid
    orders = [_ORDERS[0]] if workload.backend == "deepspeed" or pp == 1 or dp == 1 else _ORDERS
    vocabularies = ["shard"] if tp > 1 and graph.vocab_size else ["replicate"]
    if "vocabulary" in options.pins and tp > 1 and graph.vocab_size:
        vocabularies = list(options.pins["vocabulary"])
    sizes = _micro_batch_sizes(space, dp, workload, options)
    sequence = _sequence_parallel(space, graph, tp, workload, options)
    for zero_stage in _zero_stages(space, tp, pp, dp, workload, options):
        for ep in _expert_degrees(space, graph, dp, cp, workload, options):
            for size in sizes:
                count = workload.global_batch_size // (dp * size)
                for vpp in _interleavings(space, graph, pp, count, options, workload.backend):
                    for order in orders:
                        if not options.allows("order", order):
                            continue
                        degrees = Degrees(tp, pp, dp, cp, ep, vpp, zero_stage, size, count, order)
                        for parallel in sequence:
                            for vocabulary in vocabularies:
                                yield Candidate(degrees, parallel, vocabulary)

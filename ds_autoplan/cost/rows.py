"""From one line of a runs file to what a price needs: graph, cluster, workload, degrees, engine.

A run of this plugin holds its plan, and is priced as that. The schema is that of published runs:
`model` {layers, hidden, ffn, heads, kv_heads, vocab, seq, gated_mlp, experts, topk, moe_ffn,
shared_ffn, dense_layers, attention}, `hardware` {gpu, gpus_per_node, nodes, interconnect},
`parallel` {tp, pp, dp, cp, ep, vpp, sp, zero_stage, recompute}, `batch` {global, micro},
`precision`, `measured`, `source`, `notes`. `null` means the
source does not say; what is assumed then is stated at the place.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from ds_autoplan.cluster.presets import build_topology, device_facts
from ds_autoplan.cluster.topology import Topology
from ds_autoplan.cost import frameworks
from ds_autoplan.cost.frameworks import Framework
from ds_autoplan.cost.interface import StageAssignment
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.cost.row_model import experts_of, graph_of
from ds_autoplan.cost.row_values import figure, truth, whole_number
from ds_autoplan.errors import AutoplanError, BadInputError, UnsupportedError
from ds_autoplan.estimate import even_cut
from ds_autoplan.inputs import recall
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.plan import Plan
from ds_autoplan.reading import MALFORMED, count
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload

FINE_GRAINED_EXPERTS = 64
# A run that says nothing of checkpointing must have used it if it needs this many device memories.
MUST_RECOMPUTE = 1.75
HOST_MEMORY_DEVICES = ("GH200", "GB200", "GB300")
# Load of the busiest expert rank over the mean where routing is not forced to be even.
UNBALANCED_EXPERTS = 1.1


@dataclass(frozen=True)
class Row:
    """One measured run, ready to price."""

    id: str
    graph: BlockGraph
    topology: Topology
    workload: Workload
    framework: Framework
    degrees: Degrees
    stages: tuple[StageAssignment, ...]
    measured_step_s: float | None
    measured_peak_bytes: float | None
    peak_kind: str
    family: str
    shard_group: int = 0
    memory_unit: str = "GiB"
    vocabulary: str = "shard"


def read_row(data: dict[str, Any]) -> Row:
    """Interpret one line.

    Raises:
        UnsupportedError: something the model cannot price, named.
        BadInputError: a key that every row must have is missing.
    """
    try:
        if "plan" in data:
            return _read_planned(data)
        return _with_recomputation(_read(data), data)
    except AutoplanError:
        raise
    except MALFORMED as error:
        raise BadInputError(
            f"The run {data.get('id', '?')!r} lacks or misstates {error}.",
            "A run needs model, hardware, parallel, batch and precision.",
        ) from error


def _read_planned(data: dict[str, Any]) -> Row:
    """A run that holds its plan: the graph, cluster, cut and strategies are the plan's own."""
    plan = Plan.from_json(data["plan"])
    inputs = recall(plan)
    own = [[layer for layer in plan.layers if layer.stage == at] for at in range(plan.degrees.pp)]
    stages = tuple(
        StageAssignment(
            tuple(layer.index for layer in layers), tuple(layer.strategy for layer in layers)
        )
        for layers in own
    )
    measured = data["measured"]
    peak = figure(measured.get("peak_mem_gb"), "peak_mem_gb")
    unit = str(measured.get("peak_mem_unit") or "GiB")
    return Row(
        id=str(data["id"]),
        graph=inputs.graph,
        topology=inputs.topology,
        workload=inputs.workload,
        framework=frameworks.BY_BACKEND[inputs.workload.backend],
        degrees=plan.degrees,
        stages=stages,
        measured_step_s=figure(measured.get("iteration_s"), "iteration_s"),
        measured_peak_bytes=None if peak is None else peak * (2**30 if "GiB" in unit else 1e9),
        peak_kind=peak_kind_of(data),
        family=family_of(data),
        memory_unit="GiB" if "GiB" in unit else "GB",
        vocabulary=plan.vocabulary,
    )


def _read(data: dict[str, Any]) -> Row:
    parallel, batch = data["parallel"], data["batch"]
    framework = framework_of(data)
    graph = graph_of(data)
    topology = topology_of(data)
    tp, pp = whole_number(parallel["tp"], "tp"), whole_number(parallel["pp"], "pp")
    cp, ep = whole_number(parallel.get("cp"), "cp"), whole_number(parallel.get("ep"), "ep")
    world = topology.num_devices
    dp = whole_number(parallel.get("dp"), "dp", max(1, world // (tp * pp * cp)))
    if tp * pp * cp * dp != world:
        raise BadInputError(
            f"tp {tp} x pp {pp} x cp {cp} x dp {dp} are not the row's {world} devices."
        )
    if world // pp % ep:
        raise BadInputError(f"ep={ep} does not divide the {world // pp} devices of a stage.")
    global_batch = whole_number(batch["global"], "global batch")
    stated = (data.get("derived") or {}).get("microbatches")
    micro = whole_number(
        batch.get("micro"), "micro-batch", int(global_batch / dp / stated if stated else 1) or 1
    )
    if micro > global_batch:
        raise BadInputError(
            f"The micro-batch of {micro} is larger than the global batch of {global_batch}."
        )
    num_micro = max(1, round(global_batch / (dp * micro)))
    zero_stage = zero_stage_of(parallel.get("zero_stage"))
    if zero_stage is None:
        zero_stage = framework.default_zero_stage
    if zero_stage == 3 and pp > 1 and framework.gathered_under_pp:
        zero_stage, framework = 1, replace(framework, gradient_bytes=4)
    vpp = whole_number(parallel.get("vpp"), "vpp")
    if pp > 1 and num_micro < pp and framework.gathered_under_pp:
        # A rank's batch, which torchtitan cuts into as many micro-batches as there are stages.
        cut = max(parts for parts in range(1, pp + 1) if micro % parts == 0)
        micro, num_micro = micro // cut, num_micro * cut
    degrees = Degrees(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        vpp=vpp if pp > 1 else 1,
        zero_stage=zero_stage,
        micro_batch_size=micro,
        num_micro_batches=num_micro,
    )
    precision = precision_of(str(data["precision"]))
    workload = Workload(
        seq_length=whole_number(data["model"]["seq"], "sequence length"),
        global_batch_size=global_batch,
        precision=precision,
        optimizer="muon" if "muon" in str(data.get("notes", "")).lower() else "adamw",
        backend="megatron",
    )
    strategy = strategy_of(data, degrees, framework)
    measured, derived = data.get("measured") or {}, data.get("derived") or {}
    peak = figure(measured.get("peak_mem_gb"), "peak_mem_gb")
    unit = str(measured.get("peak_mem_unit") or "GiB")
    stages = stages_of(graph.num_layers, pp, strategy, _end_layers(data, framework))
    if re.search(r"selective.*\blayers?\b", str(parallel.get("recompute"))):
        stages = _every_second_layer(stages)
    return Row(
        id=str(data["id"]),
        graph=graph,
        topology=topology,
        workload=workload,
        framework=framework,
        degrees=degrees,
        stages=stages,
        measured_step_s=figure(
            measured.get("iteration_s") or derived.get("iteration_s") or None, "iteration_s"
        )
        or _step_of_throughput(measured, workload, world),
        measured_peak_bytes=None if peak is None else peak * (2**30 if "GiB" in unit else 1e9),
        peak_kind=peak_kind_of(data),
        family=family_of(data),
        shard_group=shard_group_of(data),
        memory_unit="GiB" if "GiB" in unit else "GB",
    )


def _every_second_layer(stages: tuple[StageAssignment, ...]) -> tuple[StageAssignment, ...]:
    """Every second layer checkpointed in full, the others not at all."""
    return tuple(
        replace(
            stage,
            strategies=tuple(
                replace(strategy, activation_checkpointing="full" if layer % 2 == 0 else "none")
                for layer, strategy in zip(stage.layers, stage.strategies, strict=True)
            ),
        )
        for stage in stages
    )


def _with_recomputation(row: Row, data: dict[str, Any]) -> Row:
    """The row with full checkpointing, where it says nothing of it and could not have run without.

    What passes a device's memory a little may be checkpointed in part, at little cost; GPUs that
    share a package with a CPU can move activations there. Neither is assumed to slow the run.
    """
    device = row.topology.device
    if data["parallel"].get("recompute") is not None or device.name in HOST_MEMORY_DEVICES:
        return row
    model = AnalyticCostModel(
        row.graph, row.topology, row.workload, row.framework, shard_group=row.shard_group
    )
    priced = model.step(row.degrees, row.stages, "shard")
    if max(stage.peak_bytes for stage in priced.stages) <= MUST_RECOMPUTE * device.memory_bytes:
        return row
    stages = tuple(
        replace(
            stage,
            strategies=tuple(
                replace(strategy, activation_checkpointing="full") for strategy in stage.strategies
            ),
        )
        for stage in row.stages
    )
    return replace(row, stages=stages)


def _step_of_throughput(measured: dict[str, Any], workload: Workload, world: int) -> float | None:
    rate = figure(measured.get("tokens_per_s_per_gpu") or None, "tokens_per_s_per_gpu")
    if rate is None:
        return None
    return workload.seq_length * workload.global_batch_size / (rate * world)


def family_of(data: dict[str, Any]) -> str:
    """The measurement family: one publisher's runs with one engine."""
    source = str(data.get("source", ""))
    repository = re.split(r"[@ ]", source)[0]
    if "maxtext" in str(data["id"]) or "paxml" in str(data["id"]):
        return "jax"
    return repository or str(data["id"]).split("-")[0]


def zero_stage_of(stated: object) -> int | None:
    """The ZeRO stage that a row states, as a number or by PyTorch's names; None: not stated."""
    if stated is None or stated == "":
        return None
    text = str(stated).lower()
    if match := re.search(r"\d+", text):
        return count(int(match.group(0)) + 1, "The row's zero_stage plus one", 4) - 1
    if "grad_op" in text:
        return 2
    return 3 if "shard" in text or "fsdp" in text or "hsdp" in text else 0


def shard_group_of(data: dict[str, Any]) -> int:
    """Ranks that ZeRO shards over where the row names a smaller group than dp, else 0."""
    parallel = data["parallel"]
    group = parallel.get("fsdp_group") or parallel.get("zero1_group") or 0
    return max(0, int(group))


def framework_of(data: dict[str, Any]) -> Framework:
    """The engine's behaviour, from what the row says of it; unknown engines count as Megatron."""
    text = " ".join(
        str(data.get(key, "")) for key in ("source", "notes", "id", "framework")
    ).lower()
    text += f" {device_facts(str(data['hardware']['gpu']))['architecture']}"
    for pattern, framework in frameworks.BY_PATTERN:
        if re.search(pattern, text):
            found = framework
            break
    else:
        stage = zero_stage_of(data["parallel"].get("zero_stage"))
        found = frameworks.FSDP if stage == 3 else frameworks.MEGATRON
    precision = str(data.get("precision", "")).lower()
    if "pure" in precision:
        found = replace(found, gradient_bytes=2, reduce_bytes=2, master_weights=False)
    elif "fp16 grad" in precision:
        found = replace(found, gradient_bytes=2, reduce_bytes=2)
    elif "fp32 grad" in precision:
        own = 2 if found.extra_gradient_bytes or "bf16optimizer" in precision else 0
        found = replace(found, gradient_bytes=4, extra_gradient_bytes=own)
    if "selective" in str(data["parallel"].get("recompute")) and "mlp" in str(
        data["parallel"].get("recompute")
    ):
        found = replace(found, selective="mlp")
    experts = experts_of(data["model"])
    if experts:
        # Fine-grained experts are not split further (Megatron's own recipes); coarse ones are.
        stated = data["parallel"].get("etp")
        whole = 1 if experts >= FINE_GRAINED_EXPERTS else 0
        fine = experts >= FINE_GRAINED_EXPERTS and "plain a2a" not in text
        found = replace(
            found,
            expert_tp=int(stated) if stated else whole,
            deduplicated_dispatch=fine,
            expert_imbalance=1.0 if "balanced" in text else UNBALANCED_EXPERTS,
        )
    if "expandable" in str(data["id"]):
        found = replace(found, interleaved_fragmentation=0.0)
    if "deterministic" in text:
        # Deterministic backward passes add in a fixed order.
        found = replace(found, attention="flash1")
    if "a2a 1f1b overlap" in text or "overlap-on" in text:
        found = replace(found, ep_overlap=0.8)
    return found


def precision_of(text: str) -> str:
    """Our precision's name for the row's."""
    lower = text.lower()
    if "fp4" in lower:
        return "fp4"
    if "fp8" in lower or "float8" in lower:
        return "fp8"
    if "bf16" in lower:
        return "bf16"
    if "fp16" in lower:
        return "fp16"
    if "fp32" in lower or "tf32" in lower:
        return "fp32"
    raise UnsupportedError(f"The precision {text!r} is not known.")


def peak_kind_of(data: dict[str, Any]) -> str:
    """What the row's peak memory counts: "allocated", "reserved" or "device"."""
    measured = data.get("measured", {})
    kind = f"{measured.get('peak_mem_kind') or ''} {measured.get('peak_mem_unit') or ''}".lower()
    stage = ":last" if "last_rank_memory" in data.get("flags", ()) else ""
    if "reserved/allocated" in kind:
        # One of PyTorch's two figures: the larger.
        return "reserved" + stage
    if "nvidia-smi" in kind or "device" in kind or "not stated" in kind:
        return "device" + stage
    if "alloc" in kind and "reserved" not in kind:
        return "allocated" + stage
    return "reserved" + stage


def topology_of(data: dict[str, Any]) -> Topology:
    """The cluster, with the network that `interconnect` states where it states one."""
    hardware = data["hardware"]
    total = int(hardware.get("n_gpus") or hardware["gpus_per_node"] * hardware["nodes"])
    # Where the source does not say: eight to a node.
    per_node = int(hardware.get("gpus_per_node") or min(8, total))
    nodes = int(hardware.get("nodes") or -(-total // per_node))
    text = str(hardware.get("interconnect") or "")
    gbit: float | None = None
    if match := re.search(r"(\d+)x(\d+)\s*Gb", text):
        gbit = float(match.group(1)) * float(match.group(2)) / max(per_node, 1)
    elif match := re.search(
        r"(\d+)\s*Gb(?:ps|it/s|/s)?\s*(?:/|per )\s*(node|GPU)", text, re.IGNORECASE
    ):
        gbit = float(match.group(1)) / (per_node if match.group(2).lower() == "node" else 1)
    return build_topology(nodes, per_node, str(hardware["gpu"]), gbit)


def strategy_of(data: dict[str, Any], degrees: Degrees, framework: Framework) -> Strategy:
    """One strategy for all layers."""
    parallel = data["parallel"]
    sequence = parallel.get("sp")
    if sequence is None:
        sequence = framework.default_sequence_parallel
    sequence = truth(sequence, "sp")
    recompute = str(parallel.get("recompute") or framework.default_checkpointing).lower()
    checkpointing = "none"
    if "full" in recompute or recompute == "true":
        checkpointing = "full"
    elif "selective" in recompute:
        checkpointing = "selective"
    return Strategy(
        sequence_parallel=sequence and degrees.tp > 1,
        activation_checkpointing=checkpointing,
    )


def _end_layers(data: dict[str, Any], framework: Framework) -> tuple[float, float]:
    """Layers that the embedding and the head count as where stages are cut."""
    if re.search("embeddings (as pp|count as) layers", str(data)):
        return 1.0, 1.0
    if framework.balanced_stages:
        graph = graph_of(data)
        block = sum(op.num_parameters for op in graph.classes[0].operators if op.kind == "linear")
        return 0.0, graph.vocab_size * graph.hidden_size / block
    return 0.0, 0.0


def stages_of(
    layers: int, pp: int, strategy: Strategy, ends: tuple[float, float] = (0.0, 0.0)
) -> tuple[StageAssignment, ...]:
    """An even cut, where the embedding and the head count as so many layers each.

    A layer belongs to the stage in whose share of the sum it ends; every stage gets one at least.
    """
    if ends == (0.0, 0.0) or pp == 1:
        return even_cut(layers, pp, strategy)
    share = (layers + sum(ends)) / pp
    firsts = [0]
    for stage in range(1, pp):
        first = math.floor(stage * share - ends[0] + 1e-9)
        firsts.append(min(max(first, firsts[-1] + 1), layers - pp + stage))
    return tuple(
        StageAssignment(tuple(range(first, last)), (strategy,) * (last - first))
        for first, last in zip(firsts, [*firsts[1:], layers], strict=True)
    )

"""Bytes of a rank that belong to no layer: context, NCCL, reduction bucket, stage buffers.

    overhead = context + communicators * C + peers * P + bucket

A communicator exists where its axes have more than one rank, and takes C bytes for its rings. Peers
are ranks that this one sends to or receives from: the neighbouring stages, the neighbours in the
ring of context parallelism, the ranks of its node that share experts with it.
"""

from __future__ import annotations

from math import prod

from ds_autoplan.cluster.topology import Topology
from ds_autoplan.cost.frameworks import Framework
from ds_autoplan.cost.memory import element_bytes
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.strategy import Degrees


def overhead_bytes(
    graph: BlockGraph, topology: Topology, precision: str, framework: Framework, degrees: Degrees
) -> float:
    """Context, communication buffers and reduction bucket; on a CPU the bucket alone."""
    buffers = bucket_bytes(graph, topology, precision, framework, degrees)
    if topology.device.architecture == "cpu":
        return buffers
    return (
        framework.context_bytes
        + communicators(framework, degrees, graph.tied) * framework.communicator_bytes
        + peers(topology, degrees) * framework.peer_bytes
        + buffers
    )


def communicators(framework: Framework, degrees: Degrees, tied: bool) -> int:
    """How many NCCL communicators a rank takes part in."""
    return sum(_size(axes, degrees, tied) > 1 for axes in framework.communicators)


def _size(axes: str, degrees: Degrees, tied: bool) -> int:
    """Ranks of a communicator over `axes`."""
    if axes == "ends":
        return min(2, degrees.pp) if tied else 1
    names = ("tp", "pp", "dp", "cp") if axes == "all" else axes.split("-")
    return prod(getattr(degrees, name) for name in names)


def peers(topology: Topology, degrees: Degrees) -> int:
    """Ranks with which a rank exchanges directly; messages to other nodes share one buffer."""
    return (
        min(2, degrees.pp - 1)
        + min(2, degrees.cp - 1)
        + min(degrees.ep, topology.gpus_per_node)
        - 1
    )


def bucket_bytes(
    graph: BlockGraph, topology: Topology, precision: str, framework: Framework, degrees: Degrees
) -> float:
    """DeepSpeed's buffer of gradients on their way, allocated for good."""
    if degrees.dp * degrees.cp == 1 or not framework.bucket_elements:
        return 0.0
    element = element_bytes(precision)
    # Without ZeRO only what is reduced gets copied; memory that a CPU never touches is free.
    if degrees.zero_stage == 0 or topology.device.architecture == "cpu":
        local = graph.num_parameters / degrees.tp / degrees.pp
        return element * min(framework.bucket_elements, local)
    return element * framework.bucket_elements


def stage_buffers(
    framework: Framework, degrees: Degrees, stage: int, stream_bytes: float
) -> tuple[float, float]:
    """(bytes per micro-batch in flight, bytes held for good) of hidden states between stages.

    `stream_bytes`: hidden states of one micro-batch, as a rank holds them.
    """
    if not framework.pipe_buffers or degrees.pp == 1:
        return 0.0, 0.0
    is_last = stage == degrees.pp - 1
    # One buffer to receive hidden states into, one for the gradient of those sent.
    held = stream_bytes * ((stage > 0) + (not is_last))
    waste = 1.0 + framework.wasted(degrees.vpp)
    return 0.0 if is_last else stream_bytes * waste, held

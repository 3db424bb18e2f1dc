"""What parameters cost beside their layer's compute: states, reduction, ZeRO-3 gathers, optimizer.

reduction   reduce-scatter (or all-reduce) of the gradients, bucket by bucket, beyond what hides
            under the layer's own backward pass
gather      of updated parameters (ZeRO-1, ZeRO-2) once a step, beyond what hides under forward;
            of all parameters (ZeRO-3) before each forward and backward
optimizer   one pass over the local states
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_autoplan.cost.memory import state_bytes
from ds_autoplan.cost.setting import Pass, Setting
from ds_autoplan.strategy import Degrees


@dataclass(frozen=True)
class Gathered:
    """What ZeRO-3 adds to a layer: exposed gathers, and the gathered weights."""

    forward_s: float
    backward_s: float
    workspace_bytes: float


@dataclass(frozen=True)
class Sharing:
    """How one kind of parameter is shared: ZeRO over the inner ways, copies on the outer."""

    ranks: int
    shards: int
    inner: tuple[int, ...]
    outer: tuple[int, ...]
    whole: tuple[int, ...]


def sharing(setting: Setting, degrees: Degrees, experts: bool) -> Sharing:
    """The ranks that hold the same parameters, and those among them that ZeRO shards over.

    Experts are replicated over dp * cp / ep ranks only; everything else over dp * cp.
    """
    stride = setting.topology.axis_stride(degrees, "dp_cp")
    ranks = degrees.dp * degrees.cp
    if experts:
        expert_tp = setting.expert_tp(degrees)
        stride = stride * degrees.ep * expert_tp // degrees.tp
        ranks = max(1, ranks * degrees.tp // expert_tp // degrees.ep)
    shards = min(ranks, setting.shard_group) if setting.shard_group else ranks
    span = setting.topology.span
    return Sharing(
        ranks=ranks,
        shards=shards,
        inner=span(shards, stride),
        outer=span(max(1, ranks // shards), stride * shards),
        whole=span(ranks, stride),
    )


def shared_state(
    setting: Setting,
    parameters: float,
    expert_parameters: float,
    degrees: Degrees,
    forward: Pass,
    backward: Pass,
) -> tuple[tuple[float, float, float], float, float, Gathered, float]:
    """States, bytes reduced, per-step seconds, ZeRO-3 traffic, and the per-step traffic alone."""
    workload, framework = setting.workload, setting.framework
    states = [0.0, 0.0, 0.0]
    reduced = per_step = dp_s = 0.0
    gather_forward = gather_backward = workspace = 0.0
    own = setting.element
    for count, experts in ((parameters, False), (expert_parameters, True)):
        if count <= 0:
            continue
        group = sharing(setting, degrees, experts)
        part = state_bytes(count, group.shards, degrees.zero_stage, workload, framework)
        for index, value in enumerate((part.parameters, part.gradients, part.optimizer)):
            states[index] += value
        wire = framework.reduce_bytes or framework.gradient_bytes or own
        gradient = count * workload.trainable_fraction * wire
        reduced += gradient
        local_share = count * workload.trainable_fraction
        local_share /= group.shards if degrees.zero_stage >= 1 else 1
        per_step += setting.kernels.stream_s(local_share * framework.optimizer_bytes_moved)
        if group.ranks == 1:
            continue
        gather = setting.bucketed("all_gather", count * own, group.inner)
        scatter = setting.bucketed("reduce_scatter", gradient, group.inner)
        across = setting.bucketed("all_reduce", gradient / group.shards, group.outer)
        if degrees.zero_stage >= 3:
            gather_forward += _beyond(setting, gather, forward.total_s, framework.zero3_overlap)
            gather_backward += _beyond(
                setting, gather + scatter, backward.total_s, framework.zero3_overlap
            )
            dp_s += _beyond(setting, across, backward.total_s, framework.gradient_overlap)
            workspace += 2.0 * count * own
            continue
        if degrees.zero_stage and framework.reduce_scatter:
            reduction = scatter + across
        else:
            reduction = setting.bucketed("all_reduce", gradient, group.whole)
        dp_s += _beyond(setting, reduction, backward.total_s, framework.gradient_overlap)
        if degrees.zero_stage >= 1:
            dp_s += _beyond(setting, gather, forward.total_s, framework.parameter_overlap)
    gathered = Gathered(gather_forward, gather_backward, workspace)
    return (states[0], states[1], states[2]), reduced, per_step + dp_s, gathered, dp_s


def _beyond(setting: Setting, traffic: float, compute: float, overlap: float) -> float:
    """What of `traffic` shows when a share `overlap` of it may hide under `compute`."""
    window = compute * setting.constants.overlap_window
    hidden = min(traffic * overlap, window)
    return traffic - hidden + hidden * setting.constants.overlap_slowdown

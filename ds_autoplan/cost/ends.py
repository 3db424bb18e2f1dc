"""Price of the model's ends: word embedding on the first stage, norm, head and loss on the last.

With `vocabulary="shard"` both are split over tp by (padded) rows of the vocabulary: the
embedding's output is all-reduced (reduce-scattered under sequence parallelism), the loss is
computed on the local logits. Logits live from the head's forward to its backward, which follows at
once: they are workspace.
"""

from __future__ import annotations

import math

from ds_autoplan.cluster.collectives import point_to_point_s
from ds_autoplan.cost.eager import keeps_of, norm_bytes
from ds_autoplan.cost.interface import LayerCost
from ds_autoplan.cost.setting import Detail, Pass, Setting
from ds_autoplan.cost.sharing import shared_state
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.strategy import Degrees

LOSS_KEEPS_BYTES = 4.0


def _vocabulary_ways(vocabulary: str, degrees: Degrees) -> int:
    return degrees.tp if vocabulary == "shard" else 1


def _padded(vocab_size: int, ways: int) -> float:
    return math.ceil(vocab_size / ways) * ways if ways > 1 else float(vocab_size)


def send_s(setting: Setting, degrees: Degrees, width: float, sequence_parallel: bool) -> float:
    """Exposed time of sending `width` elements a token to the next stage, one way."""
    if degrees.pp == 1:
        return 0.0
    sent = setting.tokens(degrees) * width * setting.element
    if sequence_parallel or setting.framework.scatter_sends:
        sent /= degrees.tp
    if setting.volume_only:
        return degrees.vpp * sent / setting.topology.levels[0].bytes_per_s
    stride = setting.topology.axis_stride(degrees, "pp")
    hidden = setting.framework.pipeline_overlap if degrees.vpp > 1 else 0.0
    return degrees.vpp * (1.0 - hidden) * point_to_point_s(setting.topology, sent, stride)


def embedding_cost(
    setting: Setting,
    graph: BlockGraph,
    degrees: Degrees,
    vocabulary: str,
    sequence_parallel: bool,
) -> tuple[LayerCost, Detail]:
    """Everything before the first block."""
    ways = _vocabulary_ways(vocabulary, degrees)
    tokens = setting.tokens(degrees)
    e = setting.element
    stream = tokens * setting.hidden * e
    parameters = 0.0
    compute = 0.0
    for operator in graph.embedding:
        weights = float(operator.num_parameters)
        if operator.role == "word":
            weights *= _padded(graph.vocab_size, ways) / max(1, graph.vocab_size) / ways
        elif operator.kind in ("linear", "convolution") and operator.in_features:
            compute += setting.kernels.gemm_s(tokens, operator.in_features, operator.out_features)
        parameters += weights
        compute += setting.kernels.stream_s(2.0 * stream)
    compute = max(compute, len(graph.embedding) * setting.constants.host_launch_s)
    tp_s = 0.0
    if degrees.tp > 1 and ways > 1:
        kind = "reduce_scatter" if sequence_parallel else "all_reduce"
        tp_s = setting.collective(kind, stream, degrees, "tp")
    forward = Pass(compute, tp_s, 0.0, 0.0)
    gather = 0.0
    if degrees.tp > 1 and sequence_parallel and ways > 1:
        gather = setting.collective("all_gather", stream, degrees, "tp")
    backward = Pass(2.0 * compute, gather, 0.0, 0.0)
    return _end(setting, parameters, degrees, forward, backward, 0.0, 0.0)


def head_cost(
    setting: Setting,
    graph: BlockGraph,
    degrees: Degrees,
    vocabulary: str,
    sequence_parallel: bool,
) -> tuple[LayerCost, Detail]:
    """Final norm, head and loss."""
    ways = _vocabulary_ways(vocabulary, degrees)
    tokens = setting.tokens(degrees)
    e = setting.element
    stream = tokens * setting.hidden * e
    kernels, framework = setting.kernels, setting.framework
    parameters = logits = 0.0
    forward_s = backward_s = 0.0
    for operator in graph.head:
        if operator.role != "head":
            parameters += operator.num_parameters
            moved = 2.0 * stream * framework.elementwise_passes
            forward_s += kernels.stream_s(moved)
            backward_s += kernels.stream_s(2.0 * moved)
            continue
        local = _padded(operator.out_features, ways) / ways
        logits += tokens * local
        weights = float(operator.in_features * local)
        if operator.has_bias:
            weights += local
        # A tied head is the embedding's own weight, unless another stage holds that.
        if not graph.tied or degrees.pp > 1:
            parameters += weights
        forward_s += kernels.gemm_s(tokens, operator.in_features, local, base=True)
        backward_s += kernels.gemm_s(tokens, local, operator.in_features, base=True)
        backward_s += kernels.gemm_s(operator.in_features, tokens, local, base=True)
    forward_s += kernels.stream_s(logits * framework.loss_bytes_moved)
    backward_s += kernels.stream_s(logits * framework.loss_bytes_moved * 0.5)
    tp_s = 0.0
    if degrees.tp > 1 and ways > 1:
        kind = "all_gather" if sequence_parallel else "all_reduce"
        tp_s = setting.collective(kind, stream, degrees, "tp")
    # The last stage receives hidden states and sends their gradient, though no cut follows it.
    transfer = send_s(setting, degrees, graph.hidden_size, sequence_parallel)
    forward = Pass(forward_s, tp_s if sequence_parallel else 0.0, 0.0, 0.0, transfer)
    backward = Pass(backward_s, tp_s, 0.0, 0.0, transfer)
    if framework.eager_blocks:
        # The sequence is put together again behind the last block, before the final norm.
        kept = stream / e * (norm_bytes(keeps_of(graph.model_type).norm, e) + e)
    else:
        sequence_ways = degrees.tp if sequence_parallel else 1
        kept = 2.0 * stream / sequence_ways
        if framework.gathers_linger:
            kept += stream * (1.0 - 1.0 / sequence_ways)
    # The loss keeps its 32-bit log-probabilities; the rest of its peak is transient.
    kept += logits * LOSS_KEEPS_BYTES
    # Only one chunk of an interleaved last stage has the head: one micro-batch of it is in flight.
    if degrees.vpp > 1:
        chunks = (degrees.vpp - 1) * degrees.pp + 1
        kept /= max(1.0, min(degrees.num_micro_batches, chunks / degrees.vpp))
    per_logit = framework.logit_bytes
    if ways > 1 and framework.sharded_logit_bytes:
        per_logit = framework.sharded_logit_bytes
    workspace = logits * (per_logit - LOSS_KEEPS_BYTES)
    return _end(setting, parameters, degrees, forward, backward, kept, workspace)


def _end(
    setting: Setting,
    parameters: float,
    degrees: Degrees,
    forward: Pass,
    backward: Pass,
    kept: float,
    workspace: float,
) -> tuple[LayerCost, Detail]:
    states, reduced, per_step, gathered, dp_s = shared_state(
        setting, parameters, 0.0, degrees, forward, backward
    )
    zero3 = gathered.forward_s + gathered.backward_s
    waste = 1.0 + setting.framework.wasted(degrees.vpp)
    cost = LayerCost(
        forward_s=forward.total_s + gathered.forward_s,
        backward_s=backward.total_s + gathered.backward_s,
        communication_s=forward.communication_s + backward.communication_s + zero3,
        gradient_bytes_reduced=reduced,
        parameter_bytes=states[0],
        gradient_bytes=states[1],
        optimizer_bytes=states[2],
        activation_bytes=kept * waste,
        workspace_bytes=(workspace + gathered.workspace_bytes) * waste,
        per_step_s=per_step,
    )
    detail = Detail(
        forward.tp_s + backward.tp_s, 0.0, 0.0, zero3, dp_s, forward.pp_s + backward.pp_s
    )
    return cost, detail

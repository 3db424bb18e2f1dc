"""Bytes that one rank keeps: states by engine and ZeRO stage, activations by layer and strategy.

States, per parameter of the rank's share, P being the parameter's own bytes (2 for bf16/fp16, 4 for
fp32) and d the ranks that ZeRO shards over:

    parameters   P                        (ZeRO-3: P/d, and the gathered layer is workspace)
    gradients    the accumulation buffer  (ZeRO-2, ZeRO-3: 1/d)
    optimizer    fp32 copy of low-precision parameters + the moments + what the engine adds,
                 1/d from ZeRO-1 on

Activations of one layer follow what autograd saves for backward; elements per token, by tensor, are
listed in :func:`activation_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_autoplan.cost.eager import eager_bytes_per_token, keeps_of
from ds_autoplan.cost.frameworks import Framework
from ds_autoplan.cost.shapes import mixer_elements, split_ways
from ds_autoplan.model.graph import BlockClass
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload

# fp32 numbers of state per parameter.
OPTIMIZER_STATES = {"adamw": 2, "adam": 2, "sgd": 1, "lion": 1, "adafactor": 0.01, "muon": 1}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one group of parameters on one rank."""

    parameters: float
    gradients: float
    optimizer: float


def element_bytes(precision: str) -> int:
    """Bytes of a parameter and of an activation."""
    return 4 if precision == "fp32" else 2


def state_bytes(
    parameters: float,
    shards: int,
    zero_stage: int,
    workload: Workload,
    framework: Framework,
) -> StateBytes:
    """States of `parameters` (a rank's count before ZeRO) when ZeRO shards over `shards` ranks."""
    own = element_bytes(workload.precision)
    trainable = parameters * workload.trainable_fraction
    gradient = (framework.gradient_bytes or own) + framework.extra_gradient_bytes
    if shards > 1:
        gradient += framework.sharded_copy_bytes if zero_stage else framework.replicated_copy_bytes
    states = 4.0 * OPTIMIZER_STATES.get(workload.optimizer, 2)
    low_precision = own < 4
    if low_precision and framework.master_weights:
        states += 4.0 + framework.master_gradient_bytes
    elif zero_stage >= 1 and framework.fp32_partition_copy:
        states += 4.0 + framework.master_gradient_bytes
    shard_optimizer = shards if zero_stage >= 1 else 1
    shard_gradient = shards if zero_stage >= 2 else 1
    shard_parameter = shards if zero_stage >= 3 else 1
    return StateBytes(
        parameters=parameters * own / shard_parameter,
        gradients=trainable * gradient / shard_gradient,
        optimizer=trainable * states / shard_optimizer,
    )


def activation_bytes(
    block: BlockClass,
    hidden: int,
    seq_length: int,
    tokens: float,
    strategy: Strategy,
    degrees: Degrees,
    workload: Workload,
    framework: Framework,
    model_type: str,
) -> tuple[float, float]:
    """(kept per micro-batch in flight, kept while the layer's backward runs), bytes on one rank.

    The second is what full or selective checkpointing recomputes; 0 without checkpointing.
    """
    e = float(element_bytes(workload.precision))
    ways = split_ways(block, strategy, degrees.tp)
    sequence_ways = degrees.tp if strategy.sequence_parallel else 1
    if framework.eager_blocks:
        kept, again = eager_bytes_per_token(
            block,
            keeps_of(model_type),
            hidden,
            seq_length,
            e,
            *ways,
            sequence_ways,
            degrees.tp,
            degrees.micro_batch_size,
        )
    else:
        # A quantised GEMM keeps its quantised input.
        saved = 1.0 if workload.precision in ("fp8", "fp4") else e
        norms = 1 if block.parallel_residual else 2
        # Norms: input, and output as the next linear's input; eager norms keep an fp32 copy too.
        copies = framework.norm_copies * 4.0 if e < 4 else 0.0
        kept = norms * hidden / sequence_ways * (e + saved + copies)
        core, scores = _fused_attention(block, seq_length, e, saved, ways[0], framework)
        mlp = _fused_mlp(block, hidden, e, saved, ways[1], degrees.tp, framework)
        kept += core + mlp
        if framework.gathers_linger and strategy.sequence_parallel:
            kept += norms * hidden * saved * (1.0 - 1.0 / sequence_ways)
        again = mlp if framework.selective == "mlp" else scores
        if framework.selective == "operators":
            again = kept - _selected(block, hidden, e, ways, sequence_ways)
    kept += e * mixer_elements(block)
    if strategy.activation_checkpointing == "full":
        return tokens * hidden * e / sequence_ways, tokens * kept
    if strategy.activation_checkpointing == "selective":
        return tokens * (kept - again), tokens * again
    return tokens * kept, 0.0


def _selected(
    block: BlockClass, hidden: int, element: float, ways: tuple[int, int], sequence_ways: int
) -> float:
    """Bytes per token kept where the core's output and every second GEMM's output are.

    The GEMMs in their order are query, key, value, output, gate, up, down.
    """
    kept = 2.0 * hidden / sequence_ways
    if block.attention is not None:
        attention = block.attention
        kept += attention.num_heads * (attention.head_dim + attention.value_head_dim) / ways[0]
        kv_ways = min(ways[0], attention.num_kv_heads)
        kept += attention.num_kv_heads * attention.value_head_dim / kv_ways
    if block.mlp is not None:
        inner = block.mlp.shared_intermediate_size
        inner += block.mlp.intermediate_size * max(1, block.mlp.top_k)
        kept += inner / ways[1]
    return kept * element


def _fused_attention(
    block: BlockClass,
    seq_length: int,
    element: float,
    saved: float,
    ways: int,
    framework: Framework,
) -> tuple[float, float]:
    """Bytes per token that attention keeps, and of these what recomputing its core brings back."""
    kept = scores = 0.0
    for attention in (block.attention, block.cross_attention):
        if attention is None:
            continue
        query = attention.num_heads * attention.head_dim / ways
        kv_ways = min(ways, attention.num_kv_heads)
        width = attention.num_kv_heads * (attention.value_head_dim + attention.head_dim)
        context = attention.num_heads * attention.value_head_dim / ways
        # Queries, keys and values; the core's output, as a GEMM's input and for its own backward.
        kept += (query + width / kv_ways) * element + context * saved
        kept += context * element if saved < element else 0.0
        heads = attention.num_heads / ways
        if framework.attention == "unfused":
            scores += heads * seq_length * (2.0 * element + 1.0)
        else:
            scores += heads * 4.0
    return kept + scores, scores


def _fused_mlp(
    block: BlockClass,
    hidden: int,
    element: float,
    saved: float,
    ways: int,
    tp: int,
    framework: Framework,
) -> float:
    """Bytes per token that the MLP keeps."""
    mlp = block.mlp
    if mlp is None:
        return 0.0
    kept = 0.0
    inner = mlp.shared_intermediate_size / ways
    if mlp.num_experts:
        # Routed tokens: the experts' inputs, and their outputs before they are combined.
        kept += mlp.top_k * hidden * (saved + element) / tp
        inner += mlp.top_k * mlp.intermediate_size / tp
    else:
        inner += mlp.intermediate_size / ways
    # First GEMM's output (gate and up), and the activation's output as the second GEMM's input; an
    # eager gate keeps its own activation too.
    own = (2.0 + framework.keeps_gates) if mlp.gated else 1.0
    return kept + inner * (own * element + saved)

"""What one rank holds of a block: local GEMM shapes, local parameters, FLOPs. Pure arithmetic.

Each linear of a block is a row (m, k, n, count) with the rank's share of rows, contracted and
produced features. Attention's projections split by heads: q over tp, k and v over at most the
number of kv heads (kv heads are replicated where tp is larger).
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_autoplan.model.graph import Attention, BlockClass, Operator
from ds_autoplan.strategy import Degrees, Strategy

QUERY_ROLES = frozenset({"q", "q_b", "kv_b", "cross_q"})
KEY_VALUE_ROLES = frozenset({"k", "v", "cross_k", "cross_v"})
ATTENTION_OUT_ROLES = frozenset({"attention_out", "cross_out"})
MLP_COLUMN_ROLES = frozenset({"gate", "up", "gate_up", "shared_up"})
MLP_ROW_ROLES = frozenset({"down", "shared_down"})
EXPERT_KINDS = frozenset({"experts"})


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a block on one rank; `part` is "attention", "mlp" or "experts"."""

    m: float
    k: float
    n: float
    count: float
    part: str


@dataclass(frozen=True)
class LocalBlock:
    """One rank's share of a block for one micro-batch.

    `parameters` are those sharded or replicated outside the experts, `expert_parameters` those of
    the rank's own experts. `tp_attention` and `tp_mlp` say how many ways each half is split.
    """

    gemms: tuple[Gemm, ...]
    parameters: float
    expert_parameters: float
    tp_attention: int
    tp_mlp: int
    tokens: float
    gemm_flops: float


def split_ways(block: BlockClass, strategy: Strategy, tp: int) -> tuple[int, int]:
    """Ways that attention and MLP are split over tp under `strategy`."""
    heads = strategy.attention == "heads" and "attention" in block.shardable
    shard = strategy.mlp == "shard" and "mlp" in block.shardable
    return (tp if heads else 1), (tp if shard else 1)


def features_per_rank(operator: Operator, block: BlockClass, ways: int) -> float:
    """Produced features of an attention projection on one of `ways` ranks."""
    attention = block.attention or block.cross_attention
    if attention is None or ways == 1:
        return operator.out_features / ways
    kv_ways = min(ways, attention.num_kv_heads)
    if operator.role in KEY_VALUE_ROLES:
        return operator.out_features / kv_ways
    if operator.role == "qkv":
        query = attention.num_heads * attention.head_dim
        query = min(query, operator.out_features)
        return query / ways + (operator.out_features - query) / kv_ways
    return operator.out_features / ways


def local_block(
    block: BlockClass,
    strategy: Strategy,
    degrees: Degrees,
    tokens: float,
    imbalance: float,
    expert_tp: int,
) -> LocalBlock:
    """The rank's share of `block` when its tp group works on `tokens` tokens.

    `imbalance` is the load of the busiest expert rank over the mean; `expert_tp` the ways that each
    expert is split.
    """
    ways_attention, ways_mlp = split_ways(block, strategy, degrees.tp)
    gemms: list[Gemm] = []
    parameters = expert_parameters = 0.0
    for operator in block.operators:
        k, n = float(operator.in_features), float(operator.out_features)
        weights = float(operator.num_parameters)
        if operator.kind in EXPERT_KINDS:
            experts = block.mlp.num_experts if block.mlp else 1
            top_k = block.mlp.top_k if block.mlp else 1
            local = max(1.0, experts / degrees.ep)
            rows = tokens * expert_tp / degrees.tp * top_k / experts * degrees.ep * imbalance
            if operator.role == "expert_down":
                k /= expert_tp
            else:
                n /= expert_tp
            gemms.append(Gemm(rows, k, n, local, "experts"))
            expert_parameters += weights / degrees.ep / expert_tp
            continue
        if operator.kind not in ("linear", "router"):
            parameters += weights
            continue
        part = "mlp"
        if operator.role in QUERY_ROLES or operator.role in KEY_VALUE_ROLES | {"qkv"}:
            part = "attention"
            share = features_per_rank(operator, block, ways_attention)
            weights *= share / n if n else 1.0
            n = share
        elif operator.role in ATTENTION_OUT_ROLES:
            part = "attention"
            k /= ways_attention
            weights /= ways_attention
        elif operator.role in MLP_COLUMN_ROLES:
            n /= ways_mlp
            weights /= ways_mlp
        elif operator.role in MLP_ROW_ROLES:
            k /= ways_mlp
            weights /= ways_mlp
        elif operator.role in ("other", "q_a", "kv_a"):
            part = "attention"
        gemms.append(Gemm(tokens, k, n, 1.0, part))
        parameters += weights
    flops = sum(2.0 * g.m * g.k * g.n * g.count for g in gemms)
    return LocalBlock(
        tuple(gemms),
        parameters,
        expert_parameters,
        ways_attention,
        ways_mlp,
        tokens,
        flops,
    )


def mixer_elements(block: BlockClass) -> float:
    """Elements per token that a state space or a convolution keeps and moves beside its linears.

    A convolution its input and output; a scan (or a gate) the value, the step and the gate of each
    feature. Fused kernels are assumed; not calibrated.
    """
    width = 0.0
    for operator in block.operators:
        if operator.kind == "convolution":
            width += 2.0 * operator.out_features
        elif operator.kind == "state_space":
            width += 3.0 * operator.out_features
    return width


def attended_keys(attention: Attention, seq_length: float) -> float:
    """Mean number of keys that one query meets, after causal mask and window."""
    reach = min(seq_length, attention.window or seq_length)
    if not attention.causal:
        return reach
    return reach - reach * reach / (2.0 * seq_length)


def attention_flops(
    attention: Attention, tokens: float, seq_length: float, ways: int, masked: bool = True
) -> float:
    """Forward FLOPs of scores and values on one of `ways` ranks.

    `masked=False` counts the whole score matrix, as kernels without a fused mask compute it.
    """
    keys = attended_keys(attention, seq_length) if masked else seq_length
    width = attention.head_dim + attention.value_head_dim
    return 2.0 * tokens * keys * attention.num_heads * width / ways

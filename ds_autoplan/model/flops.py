"""FLOPs of a block graph: a multiply and an add for every weight that a token meets, and attention.

linear: 2 * in * out per token;  experts: 2 * in * out * top_k
attention core: 2 * 2 * heads * (head size) * (keys seen) per token; a causal token sees half the
sequence, a windowed one no more than its window
"""

from __future__ import annotations

from ds_autoplan.model.graph import Attention, BlockClass, BlockGraph


def keys_seen(attention: Attention, seq_length: float) -> float:
    """Mean number of keys that a query attends to."""
    if attention.window is None or attention.window >= seq_length:
        return seq_length / 2 if attention.causal and not attention.cross else seq_length
    window = float(attention.window)
    if not attention.causal:
        return window
    return window - window * (window - 1) / (2 * seq_length)


def block_forward_flops(block: BlockClass, seq_length: float) -> float:
    """FLOPs of one block's forward pass over one sample."""
    tokens = seq_length * block.token_fraction
    per_token = 0.0
    for operator in block.operators:
        if operator.kind in ("linear", "router", "convolution", "state_space"):
            per_token += 2.0 * operator.in_features * operator.out_features
        elif operator.kind == "experts" and block.mlp is not None:
            per_token += 2.0 * operator.in_features * operator.out_features * block.mlp.top_k
    for attention in (block.attention, block.cross_attention):
        if attention is not None:
            size = attention.head_dim + attention.value_head_dim
            per_token += 2.0 * attention.num_heads * size * keys_seen(attention, tokens)
    return per_token * tokens


def forward_flops(graph: BlockGraph, seq_length: int) -> float:
    """FLOPs of the whole model's forward pass over one sample."""
    per_class = [block_forward_flops(block, seq_length) for block in graph.classes]
    total = sum(per_class[index] for index in graph.layers)
    last = graph.classes[graph.layers[-1]].token_fraction
    for operator in graph.embedding:
        if operator.kind in ("linear", "convolution"):
            total += 2.0 * operator.in_features * operator.out_features * seq_length
    for operator in graph.head:
        if operator.kind == "linear":
            tokens = seq_length * last if operator.name != "classifier" else 1
            total += 2.0 * operator.in_features * operator.out_features * tokens
    return total


def model_flops(graph: BlockGraph, seq_length: int) -> float:
    """FLOPs that training on one sample requires: forward, and twice that backward."""
    return 3.0 * forward_flops(graph, seq_length)

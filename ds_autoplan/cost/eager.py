"""What autograd keeps of a Hugging Face block that runs eagerly, by model type.

Measured with saved-tensor hooks on the Transformers classes (tests/cost/test_against_torch.py
repeats it). Per token, in elements of the block's own widths:

    norm    "layer": its input once; "rms": a 32-bit copy of the input, and the normed value;
            "rms32": both in 32 bits; "centred32": three 32-bit tensors
    linear  its input, once for all linears that read the same tensor
    core    queries, keys, values, a 32-bit number per head, and copies that rotary embeddings leave
    MLP     `mlp` tensors of the inner width, the second linear's input among them

Under sequence parallelism norms run on a rank's piece of the sequence. A sharded part, and
attention in any case, gathers the whole sequence first, and its linears keep what was gathered
(tests/cost/test_planned_memory.py counts it). Attention's output is put into another order before
it is scattered again; where that takes a copy, its last linear keeps the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_autoplan.model.graph import BlockClass


@dataclass(frozen=True)
class Keeps:
    """One row of the table: see the module's docstring. `query` and `key` count extra copies."""

    norm: str = "rms"
    mlp: float = 4.0
    query: float = 0.0
    key: float = 0.0
    scores: float = 0.0  # 32-bit numbers kept per score, where attention is not fused


LAYER_GELU = Keeps("layer", 2.0)
# A block of a published run whose MLP is not gated.
PLAIN_ROW = "row, plain MLP"
BY_TYPE = {
    PLAIN_ROW: LAYER_GELU,
    "gemma": Keeps("rms32"),
    "gemma2": Keeps("rms32", scores=1.0),
    "gemma3_text": Keeps("rms32"),
    "gpt2": Keeps("layer", 5.0),
    "gpt_neox": Keeps("layer", 2.0, query=2.0, key=1.0),
    "opt": Keeps("layer", 1.0),
    "phi": Keeps("layer", 5.0, query=1.0),
    "phi3": Keeps("rms", 4.0, query=2.0, key=1.0),
    "bloom": Keeps("layer", 2.0, scores=1.0),
    "falcon": Keeps("layer", 2.0, query=2.0, scores=1.0),
    "mpt": Keeps("layer", 2.0, scores=1.0),
    "gptj": Keeps("layer", 5.0),
    "starcoder2": LAYER_GELU,
    "stablelm": Keeps("layer", 4.0, query=1.0),
    "cohere": Keeps("centred32"),
    "olmo": Keeps("layer", 4.0),
    "olmo2": Keeps("rms32"),
    "bert": LAYER_GELU,
    "vit": LAYER_GELU,
    "swin": LAYER_GELU,
}
DEFAULT = Keeps()


def keeps_of(model_type: str) -> Keeps:
    """The row of `model_type`; unknown types count as Llama-like, which keeps most."""
    return BY_TYPE.get(model_type, DEFAULT)


def norm_bytes(kind: str, element: float) -> float:
    """Bytes that one norm keeps per element, beside its output."""
    if kind == "layer":
        return element
    if kind == "rms":
        return 4.0 + element
    return 8.0 if kind == "rms32" else 12.0


def eager_traffic_bytes(
    block: BlockClass,
    keeps: Keeps,
    hidden: int,
    element: float,
    attention_ways: int,
    mlp_ways: int,
    sequence_ways: int,
) -> float:
    """Bytes per token that PyTorch's own operators move forward, beyond what fused kernels move.

    A norm in 32 bits casts, squares, sums, scales, casts back and weighs; rotary embeddings of
    queries and keys scale, turn by halves, scale and add; a gate is activated, then multiplied.
    """
    e = element
    norms = sum(1 for operator in block.operators if operator.role == "norm")
    moved = norms * (_norm_traffic(keeps.norm, e) - 2.0 * e) * hidden / sequence_ways
    attention = block.attention
    if attention is not None:
        width = attention.num_heads * attention.head_dim / attention_ways
        kv_ways = min(attention_ways, attention.num_kv_heads)
        width += attention.num_kv_heads * attention.head_dim / kv_ways
        if keeps.norm != "layer" or keeps.query:
            moved += 8.0 * e * width
        if any(operator.role == "qk_norm" for operator in block.operators):
            moved += _norm_traffic(keeps.norm, e) * width
    if block.mlp is not None:
        inner = block.mlp.shared_intermediate_size
        inner += block.mlp.intermediate_size * max(1, block.mlp.top_k)
        # Activated gate and product, five tensors where a fused kernel reads two and writes one;
        # the tanh form of GELU takes eight operators, one where it is fused.
        extra = 2.0 if block.mlp.gated else (16.0 if keeps.mlp >= 5.0 else 0.0)
        moved += extra * e * inner / mlp_ways
    return moved


def _norm_traffic(kind: str, element: float) -> float:
    """Bytes per element that one norm reads and writes forward, operator by operator."""
    if kind == "layer":
        return 2.0 * element
    casts = 0.0 if element == 4.0 else 2.0 * (4.0 + element)
    squares_sum_scale = 20.0
    weigh = 2.0 * element if kind == "rms" else 8.0
    centre = 12.0 if kind == "centred32" else 0.0
    return casts + squares_sum_scale + weigh + centre


def eager_bytes_per_token(
    block: BlockClass,
    keeps: Keeps,
    hidden: int,
    seq_length: int,
    element: float,
    attention_ways: int,
    mlp_ways: int,
    sequence_ways: int,
    tp: int,
    samples: int = 1,
) -> tuple[float, float]:
    """(bytes kept per token, of which the attention core can recompute).

    `samples` is the micro-batch: a single one needs no copy to change the order of dimensions.
    """
    norms = sum(1 for operator in block.operators if operator.role == "norm")
    inputs = norms
    if keeps.norm == "layer" and block.parallel_residual:
        inputs = 1
    kept = inputs * norm_bytes(keeps.norm, element) * hidden / sequence_ways
    kept += element * hidden * _linear_inputs(block, norms, mlp_ways, sequence_ways)
    copied = sequence_ways > 1 and attention_ways > 1 and samples > 1
    core = 0.0
    has_qk_norm = any(operator.role == "qk_norm" for operator in block.operators)
    for attention in (block.attention, block.cross_attention):
        if attention is None:
            continue
        query = attention.num_heads * attention.head_dim / attention_ways
        kv_ways = min(attention_ways, attention.num_kv_heads)
        key = attention.num_kv_heads * attention.head_dim / kv_ways
        value = attention.num_kv_heads * attention.value_head_dim / kv_ways
        context = attention.num_heads * attention.value_head_dim / attention_ways
        kept += element * (query + key + value + context)
        kept += element * (keeps.query * query + keeps.key * key)
        heads = attention.num_heads / attention_ways
        core += 4.0 * heads + 4.0 * keeps.scores * heads * seq_length
        if copied:
            # The core's own output: without a copy it is the last linear's input.
            core += element * context
        if has_qk_norm:
            kept += norm_bytes(keeps.norm, element) * (query + key)
    kept += core
    mlp = block.mlp
    if mlp is not None:
        inner = mlp.shared_intermediate_size / mlp_ways
        if mlp.num_experts:
            routed = mlp.top_k / tp
            inner += routed * mlp.intermediate_size
            # Tokens gathered for their experts, and the experts' outputs before they are weighted.
            kept += 2.0 * element * routed * hidden
        else:
            inner += mlp.intermediate_size / mlp_ways
        kept += keeps.mlp * element * inner
    return kept, core


def _linear_inputs(block: BlockClass, norms: int, mlp_ways: int, sequence_ways: int) -> float:
    """Inputs of the attention's and of the MLP's first linears, in hidden states."""
    if sequence_ways == 1:
        # Parallel ones share a single norm's output.
        return 1.0 if block.parallel_residual and norms == 1 else 2.0
    gathered = 1.0 if block.attention is not None else 1.0 / sequence_ways
    return gathered + (1.0 if mlp_ways > 1 else 1.0 / sequence_ways)

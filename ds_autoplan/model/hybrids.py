"""Block graphs of models whose layers mix tokens in different ways: jamba, lfm2.

A layer's mixer is attention, a Mamba state space, or a short convolution; its second half a gated
MLP or a mixture of experts. Mixers other than attention are not split over tp. What they keep and
move beside their linears follows from the operators' widths (see `mixer_elements` in
ds_autoplan.cost.shapes) and is not calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_autoplan.errors import BadInputError
from ds_autoplan.model.build import field, fold, linear, norm, with_fingerprint
from ds_autoplan.model.graph import Attention, BlockClass, BlockGraph, Mlp, Operator, SkipEdge

Config = Mapping[str, Any]


def _depthwise(name: str, width: int, kernel: int, bias: bool) -> Operator:
    """A convolution of each feature over `kernel` tokens."""
    count = width * kernel + (width if bias else 0)
    return Operator(name, "convolution", "other", kernel, width, count, bias)


def _attention(config: Config, hidden: int) -> Attention:
    heads = field(config, ("num_attention_heads",), "number of heads")
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if hidden % heads or heads % kv_heads:
        raise BadInputError(
            f"The config has hidden size {hidden}, {heads} heads and {kv_heads} key-value heads.",
            "The hidden size must be a multiple of the heads, these of the key-value heads.",
        )
    return Attention(heads, kv_heads, hidden // heads, hidden // heads)


def _projections(attention: Attention, hidden: int, out: str) -> list[Operator]:
    query = attention.num_heads * attention.head_dim
    key = attention.num_kv_heads * attention.head_dim
    return [
        linear("self_attn.q_proj", "q", hidden, query, False),
        linear("self_attn.k_proj", "k", hidden, key, False),
        linear("self_attn.v_proj", "v", hidden, key, False),
        Operator("attention_core", "attention_core", "other", query, query),
        linear(f"self_attn.{out}", "attention_out", query, hidden, False),
    ]


def _gated(gate: str, up: str, down: str, hidden: int, width: int) -> list[Operator]:
    return [
        linear(f"feed_forward.{gate}", "gate", hidden, width, False),
        linear(f"feed_forward.{up}", "up", hidden, width, False),
        Operator("activation", "activation", "other", width, width),
        linear(f"feed_forward.{down}", "down", width, hidden, False),
    ]


def _block(
    module_class: str,
    attention: Attention | None,
    mlp: Mlp,
    mixer: list[Operator],
    feed_forward: list[Operator],
    norms: tuple[Operator, Operator],
) -> BlockClass:
    return with_fingerprint(
        BlockClass(
            fingerprint="",
            module_class=module_class,
            attention=attention,
            mlp=mlp,
            operators=(norms[0], *mixer, norms[1], *feed_forward),
            shardable=frozenset({"mlp"} if attention is None else {"attention", "mlp"}),
        )
    )


def _decoder(
    config: Config,
    name: str,
    model_type: str,
    blocks: list[BlockClass],
    final_norm: str,
    tied: bool,
) -> BlockGraph:
    hidden = field(config, ("hidden_size",), "hidden size")
    vocab = field(config, ("vocab_size",), "vocabulary size")
    classes, layers = fold(blocks)
    word = Operator("model.embed_tokens", "embedding", "word", vocab, hidden, vocab * hidden)
    head = Operator("lm_head", "linear", "head", hidden, vocab, 0 if tied else vocab * hidden)
    edges = (SkipEdge(-1, len(blocks), weight_elements=vocab * hidden),) if tied else ()
    return BlockGraph(
        name=name,
        model_type=model_type,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position=int(config.get("max_position_embeddings") or 0),
        classes=classes,
        layers=layers,
        embedding=(word,),
        head=(norm(final_norm, hidden, False), head),
        tied=tied,
        skip_edges=edges,
        layer_names=tuple(f"model.layers.{index}" for index in range(len(blocks))),
    )


def build_jamba(config: Config, name: str) -> BlockGraph:
    """Jamba: Mamba layers, attention every `attn_layer_period`, experts every other layer."""
    hidden = field(config, ("hidden_size",), "hidden size")
    width = field(config, ("intermediate_size",), "MLP width")
    experts = int(config.get("num_experts") or 1)
    top_k = int(config.get("num_experts_per_tok") or 1)
    norms = (norm("input_layernorm", hidden, False), norm("pre_ff_layernorm", hidden, False))
    blocks = []
    for index in range(field(config, ("num_hidden_layers",), "number of layers")):
        attends = _falls_on(config, "attn_layer", index)
        attention = _attention(config, hidden) if attends else None
        mixer = _projections(attention, hidden, "o_proj") if attention else _mamba(config, hidden)
        if experts > 1 and _falls_on(config, "expert_layer", index):
            mlp = Mlp(width, True, experts, top_k)
            size = experts * hidden * width
            feed_forward = [
                Operator(
                    "feed_forward.router", "router", "router", hidden, experts, hidden * experts
                ),
                Operator(
                    "feed_forward.experts.gate_up_proj",
                    "experts",
                    "expert_gate_up",
                    hidden,
                    2 * width,
                    2 * size,
                ),
                Operator("activation", "activation", "other", top_k * width, top_k * width),
                Operator(
                    "feed_forward.experts.down_proj", "experts", "expert_down", width, hidden, size
                ),
            ]
        else:
            mlp = Mlp(width, True)
            feed_forward = _gated("gate_proj", "up_proj", "down_proj", hidden, width)
        kind = "JambaAttentionDecoderLayer" if attends else "JambaMambaDecoderLayer"
        blocks.append(_block(kind, attention, mlp, mixer, feed_forward, norms))
    tied = bool(config.get("tie_word_embeddings", False))
    return _decoder(config, name, "jamba", blocks, "model.final_layernorm", tied)


def _falls_on(config: Config, what: str, index: int) -> bool:
    """Whether layer `index` is one of those that `<what>_period` and `<what>_offset` name."""
    period = field(config, (f"{what}_period",), f"period of {what}s")
    return index % period == int(config.get(f"{what}_offset") or 0)


def _mamba(config: Config, hidden: int) -> list[Operator]:
    inner = field(config, ("mamba_expand",), "Mamba expansion") * hidden
    state = field(config, ("mamba_d_state",), "Mamba state size")
    stated = config.get("mamba_dt_rank")
    rank = -(-hidden // 16) if stated in (None, "auto") else int(stated)
    bias = bool(config.get("mamba_proj_bias"))
    kernel = field(config, ("mamba_d_conv",), "Mamba convolution length")
    return [
        linear("mamba.in_proj", "other", hidden, 2 * inner, bias),
        _depthwise("mamba.conv1d", inner, kernel, bool(config.get("mamba_conv_bias", True))),
        linear("mamba.x_proj", "other", inner, rank + 2 * state, False),
        norm("mamba.dt_layernorm", rank, False, role="qk_norm"),
        norm("mamba.b_layernorm", state, False, role="qk_norm"),
        norm("mamba.c_layernorm", state, False, role="qk_norm"),
        linear("mamba.dt_proj", "other", rank, inner, True),
        Operator("mamba.A_log", "state_space", "other", state, inner, inner * state),
        Operator("mamba.D", "residual", "other", inner, inner, inner),
        linear("mamba.out_proj", "other", inner, hidden, bias),
    ]


def build_lfm2(config: Config, name: str) -> BlockGraph:
    """LFM2: short gated convolutions, attention in the layers that `layer_types` names."""
    hidden = field(config, ("hidden_size",), "hidden size")
    layers = field(config, ("num_hidden_layers",), "number of layers")
    width = _lfm2_width(config)
    attending = config.get("full_attn_idxs")
    stated = config.get("layer_types") or [
        "full_attention" if attending is None or index in attending else "conv"
        for index in range(layers)
    ]
    if len(stated) < layers:
        raise BadInputError(
            f"The config names {len(stated)} layer types for {layers} layers.",
            "Each layer has one.",
        )
    norms = (norm("operator_norm", hidden, False), norm("ffn_norm", hidden, False))
    kernel = field(config, ("conv_L_cache",), "convolution length")
    bias = bool(config.get("conv_bias"))
    blocks = []
    for kind in stated[:layers]:
        attention = _attention(config, hidden) if kind != "conv" else None
        if attention is not None:
            mixer = _projections(attention, hidden, "out_proj")
            mixer += [
                norm(f"self_attn.{which}_layernorm", attention.head_dim, False, role="qk_norm")
                for which in ("q", "k")
            ]
        else:
            mixer = [
                linear("conv.in_proj", "other", hidden, 3 * hidden, bias),
                _depthwise("conv.conv", hidden, kernel, bias),
                Operator("gates", "state_space", "other", 0, hidden),
                linear("conv.out_proj", "other", hidden, hidden, bias),
            ]
        feed_forward = _gated("w1", "w3", "w2", hidden, width)
        blocks.append(
            _block("Lfm2DecoderLayer", attention, Mlp(width, True), mixer, feed_forward, norms)
        )
    tied = bool(config.get("tie_embedding", config.get("tie_word_embeddings", True)))
    return _decoder(config, name, "lfm2", blocks, "model.embedding_norm", tied)


def _lfm2_width(config: Config) -> int:
    """Two thirds of the stated width, times a factor, up to a multiple; unless told not to."""
    width = field(config, ("block_ff_dim", "intermediate_size"), "MLP width")
    if not config.get("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return width
    step = int(config.get("block_multiple_of") or 256)
    return -(-int(factor * width) // step) * step


BUILDERS: dict[str, Callable[[Config, str], BlockGraph]] = {
    "jamba": build_jamba,
    "lfm2": build_lfm2,
}

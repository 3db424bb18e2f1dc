"""From a config and its table row to a block graph.

Every operator carries its true shape: with V the vocabulary, h the hidden size, f the MLP's width,
a heads and g key-value heads of size d, a llama block has q (h, a d), k and v (h, g d), out (a d,
h), gate and up (h, f), down (f, h) and two norms (h), and the ends are word (V, h), norm (h), head
(h, V).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_autoplan import reading
from ds_autoplan.errors import BadInputError
from ds_autoplan.model.architecture_row import Architecture, Experts, Flag
from ds_autoplan.model.graph import Attention, BlockClass, BlockGraph, Mlp, Operator, SkipEdge

Config = Mapping[str, Any]
MOST_LAYERS = 100_000  # a hundred times the deepest model trained


@dataclass(frozen=True)
class Sizes:
    """The sizes that a config states, under one set of names."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    value_head_dim: int
    ffn: int
    vocab: int
    positions: int


def field(config: Config, names: tuple[str, ...], what: str) -> int:
    """The first of `names` that the config states, as an int.

    Raises:
        BadInputError: none is there, or it is not a positive integer.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise BadInputError(
                f"The config has {name} = {value!r}.", f"The {what} must be a positive integer."
            )
        return reading.count(
            value, f"The config's {name}", MOST_LAYERS if "layers" in name else reading.MOST
        )
    raise BadInputError(
        f"The config of a {config.get('model_type')!r} model has no {' or '.join(names)}.",
        f"The {what} is needed to plan.",
        "Give the complete config.json that was saved with the model.",
    )


def flag(config: Config, value: Flag) -> bool:
    """A table row's flag: a constant, or the truth of a config field ("!name" inverts it)."""
    if isinstance(value, bool):
        return value
    if value.startswith("!"):
        return not config.get(value[1:])
    return bool(config.get(value))


def _optional(config: Config, names: tuple[str, ...]) -> int | None:
    for name in names:
        if config.get(name) is not None:
            return field(config, (name,), name)
    return None


def read_sizes(config: Config, row: Architecture) -> Sizes:
    """All sizes of a config by its table row.

    Raises:
        BadInputError: a size is missing, wrong, or the heads do not divide.
    """
    hidden = field(config, row.hidden, "hidden size")
    heads = field(config, row.heads, "number of attention heads")
    head_dim = _optional(config, row.head_dim)
    if head_dim is None or row.latent:
        if hidden % heads and not row.latent:
            raise BadInputError(
                f"The config has hidden size {hidden} and {heads} attention heads.",
                "Without a head_dim the hidden size must be a multiple of the heads.",
            )
        head_dim = hidden // heads
    kv_heads = _optional(config, row.kv_heads) or heads
    if heads % kv_heads:
        raise BadInputError(
            f"The config has {heads} attention heads and {kv_heads} key-value heads.",
            "Key-value heads are shared evenly, so their number divides that of the heads.",
        )
    if row.multi_query and not flag(config, row.new_decoder or False):
        kv_heads = 1 if flag(config, row.multi_query) else heads
    value_head_dim = head_dim
    if row.latent:
        nope = field(config, ("qk_nope_head_dim",), "query-key head size")
        rope = field(config, ("qk_rope_head_dim",), "rotary head size")
        head_dim, kv_heads = nope + rope, heads
        value_head_dim = field(config, ("v_head_dim",), "value head size")
    ffn = _optional(config, row.ffn)
    if ffn is None and row.ffn_factor:
        factor = 4 if row.ffn_factor == "4" else field(config, (row.ffn_factor,), "MLP factor")
        ffn = factor * hidden
    positions = _optional(config, row.positions)
    return Sizes(
        hidden=hidden,
        layers=field(config, row.layers, "number of layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        ffn=ffn if ffn is not None else field(config, row.ffn, "MLP width"),
        vocab=field(config, row.vocab, "vocabulary size"),
        positions=positions or 0,
    )


def linear(name: str, role: str, size_in: int, size_out: int, bias: bool) -> Operator:
    """A linear layer with `size_in` x `size_out` weights and perhaps a bias."""
    count = size_in * size_out + (size_out if bias else 0)
    return Operator(name, "linear", role, size_in, size_out, count, bias)


def norm(name: str, size: int, bias: bool, weight: bool = True, role: str = "norm") -> Operator:
    """A layer or RMS norm over `size` elements."""
    return Operator(name, "norm", role, size, size, size * (weight + bias), bias)


def fingerprint(block: BlockClass) -> str:
    """Hash of a block's structure: shapes, kinds and roles in order, but no names."""
    parts = [
        repr((block.attention, block.cross_attention, block.mlp, block.parallel_residual)),
        repr((sorted(block.shardable), block.hidden_size, block.token_fraction)),
    ]
    for operator in block.operators:
        shape = (operator.in_features, operator.out_features, operator.num_parameters)
        parts.append(repr((operator.kind, operator.role, shape, operator.has_bias)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _attention_operators(config: Config, row: Architecture, sizes: Sizes) -> list[Operator]:
    names, hidden = row.attention, sizes.hidden
    q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    bias, out_bias = flag(config, row.qkv_bias), flag(config, row.out_bias)
    if row.latent:
        operators = _latent_operators(config, sizes, bias)
    elif names.qkv:
        operators = [linear(names.qkv, "qkv", hidden, q + 2 * kv, bias)]
    else:
        operators = [
            linear(names.q, "q", hidden, q, bias),
            linear(names.k, "k", hidden, kv, bias),
            linear(names.v, "v", hidden, kv, bias),
        ]
    if row.qk_norm and flag(config, row.qk_norm_if):
        widths = {
            "head": (sizes.head_dim, sizes.head_dim),
            "full": (q, kv),
            "per_head": (q, kv),
        }[row.qk_norm]
        bias_of_norm = row.norm_bias is True and row.qk_norm == "head"
        for name, width in zip(row.qk_norm_names, widths, strict=True):
            operators.append(norm(name, width, bias_of_norm, role="qk_norm"))
    if row.sinks:
        operators.append(Operator(row.sinks, "other", "sinks", 0, 0, sizes.heads))
    value = sizes.heads * sizes.value_head_dim
    operators.append(Operator("attention_core", "attention_core", "other", q, value))
    operators.append(linear(names.out, "attention_out", value, hidden, out_bias))
    return operators


def _latent_operators(config: Config, sizes: Sizes, bias: bool) -> list[Operator]:
    """Multi-head latent attention: queries and keys/values through low-rank bottlenecks."""
    q = sizes.heads * sizes.head_dim
    rank = field(config, ("kv_lora_rank",), "key-value rank")
    rope = field(config, ("qk_rope_head_dim",), "rotary head size")
    q_rank = config.get("q_lora_rank")
    if q_rank:
        operators = [
            linear("self_attn.q_a_proj", "q_a", sizes.hidden, q_rank, bias),
            norm("self_attn.q_a_layernorm", q_rank, False, role="qk_norm"),
            linear("self_attn.q_b_proj", "q_b", q_rank, q, False),
        ]
    else:
        operators = [linear("self_attn.q_proj", "q", sizes.hidden, q, False)]
    nope_and_value = sizes.head_dim - rope + sizes.value_head_dim
    return [
        *operators,
        linear("self_attn.kv_a_proj_with_mqa", "kv_a", sizes.hidden, rank + rope, bias),
        norm("self_attn.kv_a_layernorm", rank, False, role="qk_norm"),
        linear("self_attn.kv_b_proj", "kv_b", rank, sizes.heads * nope_and_value, False),
    ]


def _mlp_operators(config: Config, row: Architecture, sizes: Sizes) -> list[Operator]:
    names, hidden, ffn = row.mlp, sizes.hidden, sizes.ffn
    bias = flag(config, row.mlp_bias)
    if names.gate_up:
        operators = [linear(names.gate_up, "gate_up", hidden, 2 * ffn, bias)]
    elif row.mlp_gated:
        operators = [
            linear(names.gate, "gate", hidden, ffn, bias),
            linear(names.up, "up", hidden, ffn, bias),
        ]
    else:
        operators = [linear(names.up, "up", hidden, ffn, bias)]
    operators.append(Operator("activation", "activation", "other", ffn, ffn))
    operators.append(linear(names.down, "down", ffn, hidden, bias))
    return operators


def _expert_operators(
    config: Config, row: Architecture, sizes: Sizes, moe: Experts
) -> tuple[Mlp, list[Operator]]:
    hidden = sizes.hidden
    count = field(config, moe.count, "number of experts")
    width = field(config, (moe.width,), "expert width")
    top_k = field(config, moe.top_k, "experts per token")
    gate_bias, down_bias = (count * 2 * width, count * hidden) if moe.expert_bias else (0, 0)
    operators = [
        Operator(
            moe.router,
            "router",
            "router",
            hidden,
            count,
            hidden * count + (count if moe.router_bias else 0),
            moe.router_bias,
        ),
        Operator(
            f"{moe.prefix}.gate_up_proj",
            "experts",
            "expert_gate_up",
            hidden,
            2 * width,
            count * hidden * 2 * width + gate_bias,
            moe.expert_bias,
        ),
        Operator("activation", "activation", "other", top_k * width, top_k * width),
        Operator(
            f"{moe.prefix}.down_proj",
            "experts",
            "expert_down",
            width,
            hidden,
            count * width * hidden + down_bias,
            moe.expert_bias,
        ),
    ]
    shared = 0
    if moe.shared_size:
        shared = _optional(config, (moe.shared_size,)) or 0
    elif moe.shared_count:
        shared = width * (_optional(config, (moe.shared_count,)) or 0)
    if shared:
        bias = flag(config, row.mlp_bias)
        operators += [
            linear(f"{moe.shared}.gate_proj", "shared_up", hidden, shared, bias),
            linear(f"{moe.shared}.up_proj", "shared_up", hidden, shared, bias),
            linear(f"{moe.shared}.down_proj", "shared_down", shared, hidden, bias),
        ]
        if moe.shared_gate:
            operators.append(linear(moe.shared_gate, "shared_gate", hidden, 1, False))
    return Mlp(width, True, count, top_k, shared), operators


def _has_experts(config: Config, moe: Experts, index: int) -> bool:
    if moe.layers == "all":
        return True
    if moe.layers == "first_dense":
        return index >= int(config.get("first_k_dense_replace") or 0)
    step = int(config.get("decoder_sparse_step") or 1)
    return index not in (config.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def window_of(config: Config, row: Architecture, index: int, layers: int) -> int | None:
    """Sliding-window length of one layer; None for full attention."""
    width = config.get(row.window_field)
    if row.window == "attention_types":
        pattern: list[str] = []
        for kinds, repeat in config.get("attention_types") or [[["global", "local"], layers]]:
            pattern += list(kinds) * int(repeat)
        return int(width or 0) if width and pattern[index] == "local" else None
    if not width or not flag(config, row.window_if):
        return None
    kinds = config.get("layer_types")
    if kinds:
        return None if kinds[index] == "full_attention" else int(width)
    rule, _, rest = row.window.partition(":")
    if rule == "all":
        return int(width)
    if rule == "from":
        return int(width) if index >= int(config.get(rest) or 0) else None
    if rule == "pattern_until":
        sliding = index % 2 == 0 and index < int(config.get(rest) or 0)
        return int(width) if sliding else None
    if rule == "pattern":
        name, _, default = rest.rpartition(":")
        period = int(config.get(name) or default) if name else int(rest)
        return int(width) if (index + 1) % period else None
    return None


def build_block(config: Config, row: Architecture, sizes: Sizes, index: int) -> BlockClass:
    """The block class of layer `index`."""
    parallel = flag(config, row.parallel_residual)
    if row.new_decoder and flag(config, row.new_decoder):
        count = config.get("num_ln_in_parallel_attn")
        names: tuple[str, ...] = ("input_layernorm",) if count == 1 else ("ln_attn", "ln_mlp")
        parallel = True
    else:
        names = row.serial_norms if row.serial_norms and not parallel else row.norms
    weight, bias = flag(config, row.norm_weight), flag(config, row.norm_bias)
    norms = [norm(name, sizes.hidden, bias, weight) for name in names]
    attention = Attention(
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        value_head_dim=sizes.value_head_dim,
        window=window_of(config, row, index, sizes.layers),
    )
    operators = [*norms[:1], *_attention_operators(config, row, sizes), *norms[1:]]
    if row.experts and _has_experts(config, row.experts, index):
        mlp, tail = _expert_operators(config, row, sizes, row.experts)
    else:
        mlp, tail = Mlp(sizes.ffn, row.mlp_gated), _mlp_operators(config, row, sizes)
    block = BlockClass(
        fingerprint="",
        module_class=row.block,
        attention=attention,
        mlp=mlp,
        operators=(*operators, *tail),
        parallel_residual=parallel,
        shardable=frozenset({"attention", "mlp"} if _splits_heads(config, row) else {"mlp"}),
    )
    return with_fingerprint(block)


def _splits_heads(config: Config, row: Architecture) -> bool:
    """Whether a tp rank can compute whole heads: by their packing, and by query and key norms.

    A norm over more than one head needs the others' values, too.
    """
    normed = row.qk_norm in ("full", "per_head") and flag(config, row.qk_norm_if)
    return row.splits_heads and not normed


def with_fingerprint(block: BlockClass) -> BlockClass:
    """The block with its fingerprint filled in."""
    return replace(block, fingerprint=fingerprint(block))


def fold(blocks: list[BlockClass]) -> tuple[tuple[BlockClass, ...], tuple[int, ...]]:
    """Blocks of equal fingerprint become one class; returns the classes and each layer's index."""
    classes: list[BlockClass] = []
    index_of: dict[str, int] = {}
    layers = []
    for block in blocks:
        if block.fingerprint not in index_of:
            index_of[block.fingerprint] = len(classes)
            classes.append(block)
        layers.append(index_of[block.fingerprint])
    return tuple(classes), tuple(layers)


def build_decoder(config: Config, row: Architecture, name: str) -> BlockGraph:
    """The block graph of a causal language model."""
    sizes = read_sizes(config, row)
    hidden = sizes.hidden
    made: dict[tuple[int | None, bool], BlockClass] = {}
    blocks = []
    for index in range(sizes.layers):
        moe = bool(row.experts and _has_experts(config, row.experts, index))
        key = (window_of(config, row, index, sizes.layers), moe)
        if key not in made:
            made[key] = build_block(config, row, sizes, index)
        blocks.append(made[key])
    classes, layers = fold(blocks)
    width = (_optional(config, (row.word_width,)) or hidden) if row.word_width else hidden
    embedding = [Operator(row.word, "embedding", "word", sizes.vocab, width, sizes.vocab * width)]
    weight, bias = flag(config, row.norm_weight), flag(config, row.norm_bias)
    if row.position and flag(config, row.position_if):
        rows = sizes.positions + row.position_offset
        embedding.append(
            Operator(row.position, "embedding", "position", rows, hidden, rows * hidden)
        )
    if row.embedding_norm:
        embedding.append(norm(row.embedding_norm, hidden, bias, weight))
    head = []
    if flag(config, row.final_norm_if):
        head.append(norm(row.final_norm, hidden, bias, weight))
    if width != hidden:
        stem = row.stack.rsplit(".", 1)[0]
        embedding.append(linear(f"{stem}.project_in", "other", width, hidden, False))
        head.append(linear(f"{stem}.project_out", "other", hidden, width, False))
    tied = bool(config.get("tie_word_embeddings", row.tied))
    head_bias = flag(config, row.head_bias)
    own = (0 if tied else sizes.vocab * width) + (sizes.vocab if head_bias else 0)
    head.append(Operator("lm_head", "linear", "head", width, sizes.vocab, own, head_bias))
    edges: tuple[SkipEdge, ...] = ()
    if tied:
        edges = (SkipEdge(-1, sizes.layers, weight_elements=sizes.vocab * width),)
    return BlockGraph(
        name=name,
        model_type=str(config["model_type"]),
        hidden_size=hidden,
        vocab_size=sizes.vocab,
        max_position=sizes.positions,
        classes=classes,
        layers=layers,
        embedding=tuple(embedding),
        head=tuple(head),
        tied=tied,
        skip_edges=edges,
        layer_names=tuple(f"{row.stack}.{index}" for index in range(sizes.layers)),
    )

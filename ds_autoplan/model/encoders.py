"""Block graphs of models that are not decoder-only language models: bert, t5, vit, swin.

Each has parts that a table row of :mod:`ds_autoplan.model.architectures` cannot hold: two stacks
with cross-attention (t5), a patch embedding in place of words (vit, swin), widths and token counts
that change along the depth (swin).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ds_autoplan.errors import BadInputError
from ds_autoplan.model.build import field, fold, linear, norm, with_fingerprint
from ds_autoplan.model.graph import Attention, BlockClass, BlockGraph, Mlp, Operator, SkipEdge

Config = Mapping[str, Any]


def _dense_block(
    module_class: str,
    attention: Attention,
    hidden: int,
    ffn: int,
    names: Mapping[str, str],
    qkv_bias: bool = True,
    extra: tuple[Operator, ...] = (),
    token_fraction: float = 1.0,
    own_width: bool = False,
) -> BlockClass:
    """An encoder block with biases, two layer norms and a plain MLP, by the given module names."""
    width = attention.num_heads * attention.head_dim
    operators = (
        norm(names["norm_1"], hidden, True),
        linear(names["q"], "q", hidden, width, qkv_bias),
        linear(names["k"], "k", hidden, width, qkv_bias),
        linear(names["v"], "v", hidden, width, qkv_bias),
        Operator("attention_core", "attention_core", "other", width, width),
        linear(names["out"], "attention_out", width, hidden, True),
        norm(names["norm_2"], hidden, True),
        linear(names["up"], "up", hidden, ffn, True),
        Operator("activation", "activation", "other", ffn, ffn),
        linear(names["down"], "down", ffn, hidden, True),
        *extra,
    )
    return with_fingerprint(
        BlockClass(
            fingerprint="",
            module_class=module_class,
            attention=attention,
            mlp=Mlp(ffn, False),
            operators=operators,
            hidden_size=hidden if own_width else 0,
            token_fraction=token_fraction,
        )
    )


def _attention(hidden: int, heads: int, window: int | None = None) -> Attention:
    if hidden % heads:
        raise BadInputError(
            f"The config has hidden size {hidden} and {heads} attention heads.",
            "The hidden size must be a multiple of the heads.",
        )
    return Attention(heads, heads, hidden // heads, hidden // heads, causal=False, window=window)


def build_bert(config: Config, name: str) -> BlockGraph:
    """BERT with its masked-language-model head."""
    hidden = field(config, ("hidden_size",), "hidden size")
    layers = field(config, ("num_hidden_layers",), "number of layers")
    vocab = field(config, ("vocab_size",), "vocabulary size")
    positions = field(config, ("max_position_embeddings",), "number of positions")
    kinds = field(config, ("type_vocab_size",), "number of token types")
    names = {
        "q": "attention.self.query",
        "k": "attention.self.key",
        "v": "attention.self.value",
        "out": "attention.output.dense",
        "norm_1": "attention.output.LayerNorm",
        "norm_2": "output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
    }
    block = _dense_block(
        "BertLayer",
        _attention(hidden, field(config, ("num_attention_heads",), "number of heads")),
        hidden,
        field(config, ("intermediate_size",), "MLP width"),
        names,
    )
    stem = "bert.embeddings"
    tied = bool(config.get("tie_word_embeddings", True))
    embedding = (
        Operator(f"{stem}.word_embeddings", "embedding", "word", vocab, hidden, vocab * hidden),
        Operator(
            f"{stem}.position_embeddings",
            "embedding",
            "position",
            positions,
            hidden,
            positions * hidden,
        ),
        Operator(
            f"{stem}.token_type_embeddings", "embedding", "position", kinds, hidden, kinds * hidden
        ),
        norm(f"{stem}.LayerNorm", hidden, True),
    )
    head = (
        linear("cls.predictions.transform.dense", "other", hidden, hidden, True),
        norm("cls.predictions.transform.LayerNorm", hidden, True),
        Operator(
            "cls.predictions.decoder",
            "linear",
            "head",
            hidden,
            vocab,
            vocab + (0 if tied else vocab * hidden + vocab),  # untied, each has its own bias
            True,
        ),
    )
    edges = (SkipEdge(-1, layers, weight_elements=vocab * hidden),) if tied else ()
    return BlockGraph(
        name=name,
        model_type="bert",
        hidden_size=hidden,
        vocab_size=vocab,
        max_position=positions,
        classes=(block,),
        layers=(0,) * layers,
        embedding=embedding,
        head=head,
        tied=tied,
        skip_edges=edges,
        layer_names=tuple(f"bert.encoder.layer.{index}" for index in range(layers)),
    )


def _t5_attention(prefix: str, role: str, hidden: int, width: int) -> tuple[Operator, ...]:
    names = {"q": f"{role}q", "k": f"{role}k", "v": f"{role}v"}
    out = "cross_out" if role else "attention_out"
    return (
        *(linear(f"{prefix}.{key}", value, hidden, width, False) for key, value in names.items()),
        Operator(f"{role}attention_core", "attention_core", "other", width, width),
        linear(f"{prefix}.o", out, width, hidden, False),
    )


def _t5_block(config: Config, decoder: bool, first: bool) -> BlockClass:
    hidden = field(config, ("d_model",), "hidden size")
    heads = field(config, ("num_heads",), "number of heads")
    size = field(config, ("d_kv",), "head size")
    ffn = field(config, ("d_ff",), "MLP width")
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated")
    width = heads * size
    operators = [
        norm("layer.0.layer_norm", hidden, False),
        *_t5_attention("layer.0.SelfAttention", "", hidden, width),
    ]
    if first:
        buckets = field(config, ("relative_attention_num_buckets",), "number of buckets")
        bias = "layer.0.SelfAttention.relative_attention_bias"
        operators.append(
            Operator(bias, "embedding", "relative_bias", buckets, heads, buckets * heads)
        )
        if decoder:  # the encoder's final norm runs between the stacks
            operators.insert(0, norm("encoder.final_layer_norm", hidden, False))
    cross = None
    if decoder:
        operators += [
            norm("layer.1.layer_norm", hidden, False),
            *_t5_attention("layer.1.EncDecAttention", "cross_", hidden, width),
        ]
        cross = Attention(heads, heads, size, size, causal=False, cross=True)
    prefix = f"layer.{2 if decoder else 1}.DenseReluDense"
    operators.append(norm(f"layer.{2 if decoder else 1}.layer_norm", hidden, False))
    if gated:
        operators += [
            linear(f"{prefix}.wi_0", "gate", hidden, ffn, False),
            linear(f"{prefix}.wi_1", "up", hidden, ffn, False),
        ]
    else:
        operators.append(linear(f"{prefix}.wi", "up", hidden, ffn, False))
    operators += [
        Operator("activation", "activation", "other", ffn, ffn),
        linear(f"{prefix}.wo", "down", ffn, hidden, False),
    ]
    return with_fingerprint(
        BlockClass(
            fingerprint="",
            module_class="T5Block",
            attention=Attention(heads, heads, size, size, causal=decoder),
            mlp=Mlp(ffn, gated),
            operators=tuple(operators),
            cross_attention=cross,
        )
    )


def build_t5(config: Config, name: str) -> BlockGraph:
    """T5 as one chain; the encoder's output is a skip edge into every decoder block."""
    hidden = field(config, ("d_model",), "hidden size")
    vocab = field(config, ("vocab_size",), "vocabulary size")
    encoders = field(config, ("num_layers",), "number of encoder layers")
    decoders = config.get("num_decoder_layers") or encoders
    blocks = [_t5_block(config, False, index == 0) for index in range(min(encoders, 2))]
    blocks += blocks[-1:] * (encoders - len(blocks))
    tail = [_t5_block(config, True, index == 0) for index in range(min(decoders, 2))]
    blocks += tail + tail[-1:] * (decoders - len(tail))
    classes, layers = fold(blocks)
    edges = [
        SkipEdge(encoders - 1, encoders + index, elements_per_token=hidden)
        for index in range(decoders)
    ]
    # transformers ties the head whatever the config's tie_word_embeddings says
    edges.append(SkipEdge(-1, len(layers), weight_elements=vocab * hidden))
    names = [f"encoder.block.{index}" for index in range(encoders)]
    names += [f"decoder.block.{index}" for index in range(decoders)]
    return BlockGraph(
        name=name,
        model_type="t5",
        hidden_size=hidden,
        vocab_size=vocab,
        max_position=0,
        classes=classes,
        layers=layers,
        embedding=(Operator("shared", "embedding", "word", vocab, hidden, vocab * hidden),),
        head=(
            norm("decoder.final_layer_norm", hidden, False),
            Operator("lm_head", "linear", "head", hidden, vocab),
        ),
        tied=True,
        skip_edges=tuple(edges),
        layer_names=tuple(names),
    )


_VIT_NAMES = {
    "q": "attention.q_proj",
    "k": "attention.k_proj",
    "v": "attention.v_proj",
    "out": "attention.o_proj",
    "norm_1": "layernorm_before",
    "norm_2": "layernorm_after",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def _labels(config: Config) -> int:
    named = config.get("id2label")
    return len(named) if named else int(config.get("num_labels") or 2)


def _patch(config: Config, stem: str, hidden: int) -> Operator:
    patch = field(config, ("patch_size",), "patch size")
    channels = field(config, ("num_channels",), "number of channels")
    contracted = channels * patch * patch
    return Operator(
        f"{stem}.projection",
        "convolution",
        "other",
        contracted,
        hidden,
        contracted * hidden + hidden,
        True,
    )


def _classifier(stem: str, hidden: int, labels: int) -> tuple[Operator, ...]:
    return (
        norm(f"{stem}.layernorm", hidden, True),
        linear("classifier", "other", hidden, labels, True),
    )


def build_vit(config: Config, name: str) -> BlockGraph:
    """ViT with its image classifier; the sequence is the patches and one class token."""
    hidden = field(config, ("hidden_size",), "hidden size")
    layers = field(config, ("num_hidden_layers",), "number of layers")
    patch = field(config, ("patch_size",), "patch size")
    tokens = (field(config, ("image_size",), "image size") // patch) ** 2 + 1
    block = _dense_block(
        "ViTLayer",
        _attention(hidden, field(config, ("num_attention_heads",), "number of heads")),
        hidden,
        field(config, ("intermediate_size",), "MLP width"),
        _VIT_NAMES,
        bool(config.get("qkv_bias", True)),
    )
    embedding = (
        _patch(config, "vit.embeddings.patch_embeddings", hidden),
        Operator("vit.embeddings.cls_token", "embedding", "position", 1, hidden, hidden),
        Operator(
            "vit.embeddings.position_embeddings",
            "embedding",
            "position",
            tokens,
            hidden,
            tokens * hidden,
        ),
    )
    return BlockGraph(
        name=name,
        model_type="vit",
        hidden_size=hidden,
        vocab_size=0,
        max_position=tokens,
        classes=(block,),
        layers=(0,) * layers,
        embedding=embedding,
        head=_classifier("vit", hidden, _labels(config)),
        tied=False,
        layer_names=tuple(f"vit.layers.{index}" for index in range(layers)),
    )


def build_swin(config: Config, name: str) -> BlockGraph:
    """Swin: the width doubles and the tokens quarter after each stage; windows bound attention."""
    width = field(config, ("embed_dim",), "embedding width")
    depths, heads = list(config["depths"]), list(config["num_heads"])
    if len(depths) != len(heads):
        raise BadInputError(
            f"The swin config has depths {depths} and num_heads {heads}.",
            "Both must have one entry per stage.",
        )
    window = field(config, ("window_size",), "window size")
    ratio = float(config.get("mlp_ratio") or 4.0)
    bias = bool(config.get("qkv_bias", True))
    blocks, names = [], []
    for stage, depth in enumerate(depths):
        hidden = width << stage
        table = Operator(
            "attention.relative_position_bias",
            "embedding",
            "relative_bias",
            (2 * window - 1) ** 2,
            heads[stage],
            (2 * window - 1) ** 2 * heads[stage],
        )
        # four tokens become one: per token of this stage a quarter of the products
        reduction = linear("downsample.reduction", "other", 4 * hidden, 2 * hidden, False)
        merge = (
            replace(reduction, in_features=hidden),
            norm("downsample.norm", 4 * hidden, True),
        )
        for index in range(depth):
            last = index == depth - 1 and stage < len(depths) - 1
            blocks.append(
                _dense_block(
                    "SwinLayer",
                    _attention(hidden, heads[stage], window * window),
                    hidden,
                    int(hidden * ratio),
                    _VIT_NAMES,
                    bias,
                    (table, *merge) if last else (table,),
                    token_fraction=1.0 / 4**stage,
                    own_width=True,
                )
            )
            names.append(f"swin.encoder.layers.{stage}.blocks.{index}")
    classes, layers = fold(blocks)
    patch = field(config, ("patch_size",), "patch size")
    image = field(config, ("image_size",), "image size")
    embedding = [
        _patch(config, "swin.embeddings.patch_embeddings", width),
        norm("swin.embeddings.norm", width, True),
    ]
    if config.get("use_absolute_embeddings"):
        tokens = (image // patch) ** 2
        name_of = "swin.embeddings.position_embeddings"
        embedding.append(Operator(name_of, "embedding", "position", tokens, width, tokens * width))
    final = width << (len(depths) - 1)
    return BlockGraph(
        name=name,
        model_type="swin",
        hidden_size=width,
        vocab_size=0,
        max_position=(image // patch) ** 2,
        classes=classes,
        layers=layers,
        embedding=tuple(embedding),
        head=_classifier("swin", final, _labels(config)),
        tied=False,
        layer_names=tuple(names),
    )


BUILDERS: dict[str, Callable[[Config, str], BlockGraph]] = {
    "bert": build_bert,
    "t5": build_t5,
    "vit": build_vit,
    "swin": build_swin,
}

"""The block graph of a row's model, from its sizes."""

from __future__ import annotations

from typing import Any

from ds_autoplan.cost.eager import PLAIN_ROW
from ds_autoplan.cost.row_values import model_size
from ds_autoplan.errors import UnsupportedError
from ds_autoplan.model.graph import Attention, BlockClass, BlockGraph, Mlp, Operator

# Multi-head latent attention of DeepSeek-V2/V3 and Kimi-K2 (public model configs): ranks of the
# compressed query and key/value, head dims without and with rotary, and of values.
MLA = {"q_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128}
# Where a run does not say: GPT-2's vocabulary, padded.
ASSUMED_VOCABULARY = 51200


def graph_of(data: dict[str, Any]) -> BlockGraph:
    """A :class:`BlockGraph` of the row's model."""
    model = data["model"]
    hidden, layers = model_size(model, "hidden"), model_size(model, "layers")
    vocab = model_size(model, "vocab", ASSUMED_VOCABULARY)
    notes = str(data.get("notes", "")).lower()
    experts = experts_of(model)
    dense_first = model_size(model, "dense_layers", 0)
    attention = _attention_operators(model)
    classes, indices = [], []
    if experts:
        classes.append(_block(model, attention, experts))
        if dense_first:
            classes.append(_block(model, attention, 0))
        indices = [1] * min(dense_first, layers) + [0] * (layers - min(dense_first, layers))
    else:
        classes.append(_block(model, attention, 0))
        indices = [0] * layers
    if model.get("encoder_layers"):
        raise UnsupportedError(
            "Encoder-decoder runs are not priced from a runs file;",
            "its rows describe one stack of layers.",
        )
    if "mtp layer possibly included" in notes:
        # A multi-token-prediction layer: one more block, and the head once more (priced as a
        # block).
        indices.append(0)
    tied = _is_tied(model, notes, classes, indices)
    word = Operator("word", "embedding", "word", 0, hidden, vocab * hidden)
    head = Operator("head", "linear", "head", hidden, vocab, 0 if tied else vocab * hidden)
    norm = Operator("norm", "norm", "norm", 0, hidden, hidden)
    return BlockGraph(
        name=str(model.get("name", data["id"])),
        model_type="row" if model.get("gated_mlp") else PLAIN_ROW,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position=model_size(model, "seq"),
        classes=tuple(classes),
        layers=tuple(indices),
        embedding=(word,),
        head=(norm, head),
        tied=tied,
    )


def _is_tied(
    model: dict[str, Any], notes: str, classes: list[BlockClass], indices: list[int]
) -> bool:
    """Whether embedding and head share a weight: as stated, or as the parameter count says.

    Where neither tells, models without gated MLPs do.
    """
    if "tied embeddings" in notes:
        return "untied" not in notes
    table = model_size(model, "vocab", 0) * model_size(model, "hidden")
    beyond = 1e9 * float(model.get("params_b") or 0) - sum(
        classes[index].num_parameters for index in indices
    )
    for tables in (1, 2):
        if abs(beyond - tables * table) < table / 4:
            return tables == 1
    return not model.get("gated_mlp") and "untied" not in notes


def experts_of(model: dict[str, Any]) -> int:
    """Experts of a mixture; 0 for dense models (a single expert is none)."""
    experts = model_size(model, "experts", 0)
    return experts if experts > 1 else 0


def _linear(name: str, role: str, k: int, n: int) -> Operator:
    return Operator(name, "linear", role, k, n, k * n)


def _attention_operators(model: dict[str, Any]) -> tuple[Attention, tuple[Operator, ...]]:
    hidden = model_size(model, "hidden")
    heads = model_size(model, "heads", max(1, hidden // 128))
    kv_heads = model_size(model, "kv_heads", heads)
    if str(model.get("attention") or "").upper() == "MLA":
        key = MLA["nope"] + MLA["rope"]
        shape = Attention(heads, heads, key, MLA["value"])
        return shape, (
            _linear("q_a", "other", hidden, MLA["q_rank"]),
            _linear("q_b", "q", MLA["q_rank"], heads * key),
            _linear("kv_a", "other", hidden, MLA["kv_rank"] + MLA["rope"]),
            _linear("kv_b", "q", MLA["kv_rank"], heads * (MLA["nope"] + MLA["value"])),
            _linear("out", "attention_out", heads * MLA["value"], hidden),
        )
    head_dim = model_size(model, "head_dim", max(1, hidden // heads))
    shape = Attention(heads, kv_heads, head_dim, head_dim)
    return shape, (
        _linear("qkv", "qkv", hidden, (heads + 2 * kv_heads) * head_dim),
        _linear("out", "attention_out", heads * head_dim, hidden),
    )


def _block(
    model: dict[str, Any], attention: tuple[Attention, tuple[Operator, ...]], experts: int
) -> BlockClass:
    hidden, gated = model_size(model, "hidden"), bool(model.get("gated_mlp"))
    shape, operators = attention
    # An MLP whose width is not stated is four times as wide as the model, gated ones 8/3.
    usual = model_size(model, "ffn", 8 * hidden // 3 if gated else 4 * hidden)
    inner = model_size(model, "moe_ffn", usual) if experts else usual
    shared = model_size(model, "shared_ffn", 0) if experts else 0
    top_k = model_size(model, "topk", 1) if experts else 0
    wide = 2 if gated else 1
    norms = [Operator(name, "norm", "norm", 0, hidden, hidden) for name in ("norm_1", "norm_2")]
    parts = [*operators, *norms]
    if experts:
        parts.append(_linear("router", "router", hidden, experts))
        size = experts * hidden * inner
        kind = "experts"
        parts.append(Operator("up", kind, "expert_gate_up", hidden, wide * inner, wide * size))
        parts.append(Operator("down", kind, "expert_down", inner, hidden, size))
    width = shared if experts else inner
    if width:
        parts.append(_linear("mlp_up", "gate_up" if gated else "up", hidden, wide * width))
        parts.append(_linear("mlp_down", "down", width, hidden))
    mlp = Mlp(inner, gated, experts, top_k, shared)
    return BlockClass("moe" if experts else "dense", "row", shape, mlp, tuple(parts))

"""A small config of the same architecture: the same structure and divisibility, sizes cut down.

What a plan's correctness depends on is kept: flags, ties, biases, layer pattern, and for every
count how it relates to the degrees. Let H and K be the query and key-value heads, F the MLP's
width, L the layers:

    H % tp, K % tp, F % tp, L % pp    zero in the small model where they are zero in the large one
    K < tp, K = 1, K = H              likewise
    heads * head width : hidden       the same ratio

The vocabulary becomes odd, so that it is padded whenever it is sharded. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.model.architecture_row import Architecture
from ds_autoplan.model.architectures import ARCHITECTURES
from ds_autoplan.model.build import Sizes, read_sizes
from ds_autoplan.model.load import complete_config, graph_of_config

VOCABULARY, POSITIONS, WINDOW, EXPERTS = 101, 64, 8, 4
MOST_HEADS, MOST_LAYERS = 16, 8
TOKENS = {"pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}


def small_config(
    config: Mapping[str, Any], name: str, tp: int, pp: int, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """The small config, as a dict with `model_type`.

    Args:
        config: the Hugging Face config of the large model; what it omits takes the defaults.
        name: the model's name, for errors.
        tp: tensor-parallel degree whose divisibility is kept.
        pp: pipeline degree whose divisibility is kept.
        overrides: keys set as they are, after everything else.

    Raises:
        AutoplanError: the architecture is not known, or is none that a plan trains.
    """
    full = complete_config(config, name)
    row = ARCHITECTURES.get(full["model_type"])
    if row is None or row.latent:
        raise UnsupportedError(
            f"The model type {full['model_type']!r} of {name!r} cannot be verified.",
            "Plans are run for causal language models with multi-head attention.",
            "Verify a decoder-only model.",
        )
    sizes = read_sizes(full, row)
    layers = _layers(graph_of_config(config, name).layers, pp)
    heads, kv_heads = _heads(sizes, tp)
    width = _head_width(full)
    stated = any(full.get(key) is not None for key in row.head_dim)
    hidden = _hidden(sizes, heads * width) if stated else heads * width
    small = dict(full)
    _put(small, row.layers, layers)
    _put(small, row.heads, heads)
    _put(small, row.hidden, hidden)
    _put(small, row.vocab, VOCABULARY)
    if stated:
        _put(small, row.head_dim, width)
    if row.kv_heads and not row.multi_query or any(full.get(k) is not None for k in row.kv_heads):
        _put(small, row.kv_heads, kv_heads)
    if any(full.get(key) is not None for key in row.ffn):
        _put(small, row.ffn, _ffn(sizes, hidden, tp))
    if row.positions:
        _put(small, row.positions, min(sizes.positions or POSITIONS, POSITIONS))
    _experts(small, row, hidden)
    _the_rest(small, full, sizes, layers, hidden, width)
    return {**small, **overrides}


def _put(config: dict[str, Any], names: tuple[str, ...], value: int) -> None:
    """Set the field that the config states (else the first); the other names of it go."""
    stated = next((key for key in names if config.get(key) is not None), names[0])
    for key in names:
        config.pop(key, None)
    config[stated] = value


def _layers(classes: tuple[int, ...], pp: int) -> int:
    """Enough for every stage and every kind of layer, divisible by pp where the model's are."""
    seen = [classes.index(kind) + 1 for kind in set(classes)]
    least = max(2, pp, min(max(seen), MOST_LAYERS))
    divisible = len(classes) % pp == 0
    count = least
    while (count % pp == 0) != divisible and pp > 1:
        count += 1
    return count


def _heads(sizes: Sizes, tp: int) -> tuple[int, int]:
    """The smallest query and key-value head counts that relate to each other and to tp alike."""

    def kind(heads: int, kv_heads: int) -> tuple[bool, ...]:
        return (
            heads % tp == 0,
            kv_heads % tp == 0,
            kv_heads < tp,
            kv_heads == 1,
            kv_heads == heads,
        )

    wanted = kind(sizes.heads, sizes.kv_heads)
    for heads in range(2, MOST_HEADS + 1):
        for kv_heads in range(1, heads + 1):
            if heads % kv_heads == 0 and kind(heads, kv_heads) == wanted:
                return heads, kv_heads
    raise UnsupportedError(
        f"{sizes.heads} query heads on {sizes.kv_heads} key-value heads over tp {tp} cannot be "
        f"verified with at most {MOST_HEADS} heads."
    )


def _head_width(full: Mapping[str, Any]) -> int:
    """8, or what it takes for the rotated part of a head to be even."""
    rope = full.get("rope_parameters") or {}
    for key in ("partial_rotary_factor", "rotary_pct"):
        factor = rope.get(key, full.get(key))
        if isinstance(factor, float):
            return next(width for width in (8, 16, 32, 64) if int(width * factor) % 2 == 0 < factor)
    return 8


def _hidden(sizes: Sizes, projected: int) -> int:
    ratio = sizes.hidden / (sizes.heads * sizes.head_dim)
    return max(8, round(projected * min(max(ratio, 0.5), 2.0) / 4) * 4)


def _ffn(sizes: Sizes, hidden: int, tp: int) -> int:
    size = round(hidden * min(sizes.ffn / sizes.hidden, 3.0))
    if sizes.ffn % tp == 0:
        return -(-size // (2 * tp)) * 2 * tp
    return size + 1 - size % 2


def _experts(small: dict[str, Any], row: Architecture, hidden: int) -> None:
    if row.experts is None:
        return
    _put(small, row.experts.count, EXPERTS)
    _put(small, row.experts.top_k, 2)
    for key in (row.experts.width, row.experts.shared_size):
        if key and key not in row.ffn:
            small[key] = hidden


def _the_rest(
    small: dict[str, Any],
    full: Mapping[str, Any],
    sizes: Sizes,
    layers: int,
    hidden: int,
    width: int,
) -> None:
    """Windows, layer patterns, rotary tables, projected embeddings, token ids."""
    for key in ("sliding_window", "window_size"):
        if full.get(key):
            small[key] = WINDOW
    if full.get("use_sliding_window"):
        small["max_window_layers"] = layers // 2
    for key in ("layer_types", "no_rope_layers"):
        if full.get(key):
            small[key] = list(full[key])[:layers]
    if full.get("attention_types"):
        pattern = list(full["attention_types"][0][0])
        small["num_layers"] = -(-layers // len(pattern)) * len(pattern)
        small["attention_types"] = [[pattern, small["num_layers"] // len(pattern)]]
        small.pop("attention_layers", None)
    if full.get("rotary_dim"):
        small["rotary_dim"] = width // 2
    projected = full.get("word_embed_proj_dim")
    if projected is not None:
        small["word_embed_proj_dim"] = hidden if projected == sizes.hidden else hidden * 3 // 4
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(full.get(key), dict):
            small[key] = {
                name: value[: width // 2] if isinstance(value, list) else value
                for name, value in full[key].items()
            }
    for key, token in TOKENS.items():
        value = full.get(key)
        if isinstance(value, int) and value >= VOCABULARY:
            small[key] = token

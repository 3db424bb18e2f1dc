"""Grids of cases for `ds-autoplan verify`: a small one that covers all pairs, and the full one.

`python -m tests.distributed.grids small|full > cases.jsonl` writes one for the command line.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
from dataclasses import dataclass
from typing import Any

from ds_autoplan.model.architectures import ARCHITECTURES

DEGREES = (
    (2, 1, 1),
    (4, 1, 1),
    (1, 2, 1),
    (1, 4, 1),
    (1, 1, 2),
    (2, 2, 1),
    (2, 1, 2),
    (1, 2, 2),
    (1, 1, 4),
)
CHECKPOINTING = ("none", "selective", "full")
ODD = ("", "heads", "kv", "layers", "ffn")


@dataclass(frozen=True)
class Variant:
    """One architecture: what to verify, and the names of its sizes in the config ("" for none)."""

    model: str
    config: tuple[tuple[str, Any], ...] = ()
    heads: str = "num_attention_heads"
    kv: str = "num_key_value_heads"
    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    ffn: str = "intermediate_size"

    def overrides(self, odd: str, tp: int, pp: int) -> dict[str, Any] | None:
        """Keys of the small config for one kind of odd size; None where it has no meaning here."""
        sizes: dict[str, Any] = dict(self.config)
        if odd == "heads":
            if tp == 1 or sizes.get("num_kv_heads") or sizes.get("num_key_value_heads") == 1:
                return None
            sizes |= {self.heads: 3, self.hidden: 24}
            if self.kv:
                sizes[self.kv] = 3
        elif odd == "kv":
            if tp == 1 or not self.kv:
                return None
            sizes[self.kv] = 1
        elif odd == "layers":
            if pp == 1:
                return None
            sizes[self.layers] = pp + 1
        elif odd == "ffn":
            if tp == 1 or not self.ffn:
                return None
            sizes[self.ffn] = 51
        return sizes


_LLAMA = (("num_attention_heads", 4), ("num_key_value_heads", 2), ("hidden_size", 32))
_MANY = (("num_attention_heads", 4), ("hidden_size", 32))
VARIANTS: dict[str, Variant] = {
    "llama": Variant("llama", _LLAMA),
    "llama tied": Variant("llama", (*_LLAMA, ("tie_word_embeddings", True))),
    "mistral": Variant("mistral", _LLAMA),
    "qwen2": Variant("qwen2", _LLAMA),
    "qwen3": Variant("qwen3", (*_LLAMA, ("tie_word_embeddings", True))),
    "gemma tied": Variant("gemma-2b"),
    "gemma untied": Variant("gemma", (*_LLAMA, ("tie_word_embeddings", False))),
    "gpt2": Variant(
        "gpt2", (("n_head", 4), ("n_embd", 32)), "n_head", "", "n_embd", "n_layer", "n_inner"
    ),
    "gpt_neox": Variant("gpt_neox", kv=""),
    "gpt_neox serial": Variant("gpt_neox", (("use_parallel_residual", False),), kv=""),
    "opt": Variant("opt", _MANY, kv="", ffn="ffn_dim"),
    "opt projected": Variant(
        "opt", (*_MANY, ("word_embed_proj_dim", 20)), kv="", ffn="ffn_dim"
    ),
    "phi3": Variant("phi3", _LLAMA),
    "bloom": Variant(
        "bloom", (("n_head", 4), ("hidden_size", 32)), "n_head", "", layers="n_layer", ffn=""
    ),
    "falcon": Variant("falcon", _MANY, kv="", ffn="ffn_hidden_size"),
    "falcon grouped": Variant("falcon-40b", kv="num_kv_heads", ffn="ffn_hidden_size"),
    "falcon alibi": Variant(
        "falcon",
        (*_MANY, ("multi_query", False), ("alibi", True), ("parallel_attn", False), ("bias", True)),
        kv="",
        ffn="ffn_hidden_size",
    ),
}  # fmt: skip


def case_of(
    variant: str,
    degrees: tuple[int, int, int],
    zero_stage: int,
    sequence_parallel: bool,
    checkpointing: str,
    accumulation: int,
    odd: str,
) -> dict[str, Any] | None:
    """A case as the JSON of a grid; None for a combination that does not exist."""
    tp, pp, dp = degrees
    if (pp > 1 and zero_stage > 1) or (tp == 1 and sequence_parallel):
        return None
    config = VARIANTS[variant].overrides(odd, tp, pp)
    if config is None:
        return None
    words = [variant, f"tp{tp} pp{pp} dp{dp}", f"zero{zero_stage}"]
    words += ["sp"] * sequence_parallel + [checkpointing] * (checkpointing != "none")
    words += [f"accumulation{accumulation}"] * (accumulation > 1) + [f"odd-{odd}"] * bool(odd)
    return {
        "name": " ".join(words),
        "model": VARIANTS[variant].model,
        "tp": tp,
        "pp": pp,
        "dp": dp,
        "zero_stage": zero_stage,
        "sequence_parallel": sequence_parallel,
        "activation_checkpointing": checkpointing,
        "gradient_accumulation_steps": accumulation,
        "steps": 3,
        "config": config,
    }


@functools.cache
def _all(variants: tuple[str, ...]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    choices = itertools.product(
        variants, DEGREES, (0, 1, 2, 3), (False, True), CHECKPOINTING, (1, 3), ODD
    )
    found = ((choice, case_of(*choice)) for choice in choices)
    return [(choice, case) for choice, case in found if case is not None]


def _features(choice: tuple[Any, ...]) -> list[tuple[str, Any]]:
    variant, (tp, pp, dp), zero_stage, sequence_parallel, checkpointing, accumulation, odd = choice
    return [
        ("variant", variant),
        ("tp", tp),
        ("pp", pp),
        ("dp", min(dp, 2)),
        ("zero", zero_stage),
        ("sp", sequence_parallel),
        ("checkpointing", checkpointing),
        ("accumulation", accumulation),
        ("odd", odd),
    ]


def pairs(choice: tuple[Any, ...]) -> set[tuple[Any, Any]]:
    """Pairs of values that a choice contains (an architecture with a ZeRO stage does not count)."""
    found = set(itertools.combinations(_features(choice), 2))
    return {pair for pair in found if {pair[0][0], pair[1][0]} != {"variant", "zero"}}


@functools.cache
def small_grid() -> list[dict[str, Any]]:
    """Few cases that contain every pair of values that exists; the same ones each time."""
    everything = _all(tuple(VARIANTS))
    numbers: dict[tuple[Any, Any], int] = {}
    masks = []
    for choice, _ in everything:
        mask = 0
        for pair in pairs(choice):
            mask |= 1 << numbers.setdefault(pair, len(numbers))
        masks.append(mask)
    order = list(range(len(everything)))
    random.Random(1).shuffle(order)
    missing = (1 << len(numbers)) - 1
    picked = []
    while missing:
        best = max(order, key=lambda index: (masks[index] & missing).bit_count())
        missing &= ~masks[best]
        picked.append(best)
    return [everything[index][1] for index in sorted(picked)]


def full_grid() -> list[dict[str, Any]]:
    """For every architecture all degrees with every ZeRO stage, sequence parallel on and off.

    The other choices go round, so that each meets each degree several times.
    """
    others = itertools.cycle(itertools.product(CHECKPOINTING, (1, 3), ODD))
    cases = []
    for variant, degrees, zero_stage, parallel in itertools.product(
        VARIANTS, DEGREES, (0, 1, 2, 3), (False, True)
    ):
        if case_of(variant, degrees, zero_stage, parallel, "none", 1, "") is None:
            continue
        case = None
        while case is None:
            case = case_of(variant, degrees, zero_stage, parallel, *next(others))
        cases.append(case)
    return cases


def other_decoders() -> list[str]:
    """Dense decoders of the table that have no variant above."""
    covered = {variant.model for variant in VARIANTS.values()}
    return sorted(
        name
        for name, row in ARCHITECTURES.items()
        if row.experts is None and not row.latent and name not in covered
    )


# (tp, pp, dp), ZeRO stage, sequence parallel, checkpointing: every part of the runtime once.
OTHERS = (
    ((2, 2, 1), 1, True, "selective"),
    ((4, 1, 1), 0, True, "full"),
    ((2, 1, 2), 2, False, "none"),
    ((1, 2, 2), 1, False, "none"),
)


def other_grid(settings: int) -> list[dict[str, Any]]:
    """Each of :func:`other_decoders` under the first so many of OTHERS."""
    return [
        {
            "name": f"{model} tp{tp} pp{pp} dp{dp}",
            "model": model,
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "zero_stage": zero_stage,
            "sequence_parallel": parallel,
            "activation_checkpointing": checkpointing,
            "steps": 3,
        }
        for model in other_decoders()
        for (tp, pp, dp), zero_stage, parallel, checkpointing in OTHERS[:settings]
    ]


if __name__ == "__main__":
    grids = {"small": small_grid(), "full": full_grid() + other_grid(len(OTHERS))}
    for entry in grids[sys.argv[1]]:
        print(json.dumps(entry))

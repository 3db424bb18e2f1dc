"""What cannot be read off a Hugging Face module: how fused weights are packed, what its ints mean.

One row per attention module's structure. A row matches where its projections exist; rows that share
names are told apart by `model_types`. Sizes (heads, head width) come from the modules, not from
here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionLayout:
    """How one kind of attention packs its projections.

    Attributes:
        projections: "separate" (q, k, v), "blocks" (one weight: all q heads, all k, all v),
            "per_head" (for each head q, k, v), "grouped" (for each kv head its q heads, then k, v);
            "falcon" and "gpt_bigcode": one of these, by the module's flags; "mixed": packed in a
            way that tp does not cut (attention is replicated).
        names: the projection modules, in the order of q, k, v, or the fused one.
        out: the output projection.
        model_types: Hugging Face model types the row holds for; empty: any that has the modules.
        counts_heads: attributes of the module that hold the number of query heads.
        counts_kv_heads: those that hold the number of kv heads.
        widths: those that hold query heads * head width.
        kv_widths: those that hold kv heads * head width.
        head_width: attribute that holds the head width.
        reads_config: the forward reads head counts from `self.config`.
    """

    projections: str
    names: tuple[str, ...]
    out: str
    model_types: tuple[str, ...] = ()
    counts_heads: tuple[str, ...] = ("num_heads", "num_attention_heads", "n_head", "n_heads")
    counts_kv_heads: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads", "kv_heads")
    widths: tuple[str, ...] = ()
    kv_widths: tuple[str, ...] = ()
    head_width: str = "head_dim"
    reads_config: bool = False


ATTENTION_LAYOUTS = (
    AttentionLayout("separate", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    AttentionLayout("separate", ("q_proj", "k_proj", "v_proj"), "dense", ("phi",)),
    AttentionLayout(
        "separate",
        ("q_proj", "k_proj", "v_proj"),
        "out_proj",
        ("opt", "gpt_neo", "gptj", "xglm", "biogpt"),
        widths=("embed_dim",),
    ),
    AttentionLayout("blocks", ("Wqkv",), "out_proj", ("mpt",), widths=("hidden_size",)),
    AttentionLayout("mixed", ("qkv_proj",), "out_proj", ("codegen",)),
    AttentionLayout(
        "gpt_bigcode",
        ("c_attn",),
        "c_proj",
        ("gpt_bigcode",),
        widths=("embed_dim", "split_size"),
        kv_widths=("kv_dim",),
    ),
    AttentionLayout("per_head", ("query_key_value",), "dense", ("persimmon",)),
    AttentionLayout("blocks", ("qkv_proj",), "o_proj", ("phi3",), reads_config=True),
    AttentionLayout("blocks", ("c_attn",), "c_proj", ("gpt2",), widths=("embed_dim", "split_size")),
    AttentionLayout(
        "per_head", ("query_key_value",), "dense", ("gpt_neox",), head_width="head_size"
    ),
    AttentionLayout(
        "per_head", ("query_key_value",), "dense", ("bloom",), widths=("hidden_size", "split_size")
    ),
    AttentionLayout(
        "falcon", ("query_key_value",), "dense", ("falcon",), widths=("hidden_size", "split_size")
    ),
)

# Column-parallel layers (a fused pair holds all gates, then all ups), then the row-parallel one.
MLP_LAYOUTS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("fc1",), "fc2"),
    (("c_fc",), "c_proj"),
    (("fc_in",), "fc_out"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)

# Model types whose blocks add to the output of a part in place.
WRITES_IN_PLACE = ("falcon",)

# Modules that hold a block's attention and its MLP; "" is the block itself.
ATTENTION_NAMES = ("self_attn", "attn.attention", "attn", "attention", "self_attention")
MLP_NAMES = ("mlp", "ffn", "")


def projection_rows(
    projections: str, heads: int, kv_heads: int, width: int, local: list[int], local_kv: list[int]
) -> list[Tensor]:
    """Rows of each projection that compute the query heads `local` with the kv heads `local_kv`.

    Args:
        projections: an `AttentionLayout.projections`.
        heads: query heads of the whole model.
        kv_heads: kv heads of the whole model.
        width: elements per head.
        local: query heads of one rank, ascending.
        local_kv: kv heads of one rank; the i-th serves len(local) / len(local_kv) query heads.

    Returns:
        One index tensor per projection, in the order the local module wants its rows.
    """

    def rows(head_rows: list[int]) -> Tensor:
        starts = torch.tensor(head_rows, dtype=torch.long) * width
        return (starts[:, None] + torch.arange(width)).flatten()

    if projections == "separate":
        return [rows(local), rows(local_kv), rows(local_kv)]
    if projections == "blocks":
        keys = [heads + head for head in local_kv]
        values = [heads + kv_heads + head for head in local_kv]
        return [rows(local + keys + values)]
    if projections == "per_head":
        return [rows([3 * head + part for head in local for part in range(3)])]
    if projections == "grouped":
        group, per_kv = heads // kv_heads, len(local) // len(local_kv)
        picked: list[int] = []
        for index, kv in enumerate(local_kv):
            mine = local[index * per_kv : (index + 1) * per_kv]
            start = kv * (group + 2)
            picked += [start + head - kv * group for head in mine]
            picked += [start + group, start + group + 1]
        return [rows(picked)]
    raise AssertionError(f"no such projections: {projections}")


def packing(layout: AttentionLayout, attention: torch.nn.Module) -> str:
    """The `projections` of one module; where a model type has several, its own flags tell."""
    if layout.projections not in ("falcon", "gpt_bigcode"):
        return layout.projections
    if getattr(attention, "new_decoder_architecture", False):
        return "grouped"
    return "blocks" if attention.multi_query else "per_head"


def heads_of_rank(heads: int, kv_heads: int, tp: int, rank: int) -> tuple[list[int], list[int]]:
    """Query and kv heads of one tp rank.

    Where a rank's query heads need kv heads in equal, contiguous shares, each kv head is listed
    once; otherwise once per query head that reads it.

    Returns:
        (query heads, kv heads); `len(query) / len(kv)` query heads read each kv head.
    """
    share = heads // tp
    local = list(range(rank * share, (rank + 1) * share))
    needed = [head * kv_heads // heads for head in local]
    distinct = sorted(set(needed))
    equal = all(needed.count(kv) * len(distinct) == len(local) for kv in distinct)
    return local, distinct if equal else needed

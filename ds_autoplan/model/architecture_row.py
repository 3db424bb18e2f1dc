"""What a row of the table of architectures says: names, layouts, flags.

A *flag* is True, False, or the name of a config field that says which ("!name" inverts it).
"""

from __future__ import annotations

from dataclasses import dataclass

Flag = bool | str


@dataclass(frozen=True)
class AttentionNames:
    """Module names of the projections; "" where the row's layout has none."""

    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    out: str = "self_attn.o_proj"


@dataclass(frozen=True)
class MlpNames:
    """Module names of the MLP's linears; `gate_up` names a fused gate and up projection."""

    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    down: str = "mlp.down_proj"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP.

    `layers`: which layers have it: "all"; "step" (every `decoder_sparse_step`-th, minus
    `mlp_only_layers`); "first_dense" (all but the first `first_k_dense_replace`). `shared_size`:
    field with the shared expert's width ("" for none); `shared_count`: field with the number of
    shared experts, each as wide as a routed one.
    """

    count: tuple[str, ...] = ("num_local_experts", "num_experts")
    top_k: tuple[str, ...] = ("num_experts_per_tok",)
    width: str = "intermediate_size"
    layers: str = "all"
    router: str = "mlp.gate"
    router_bias: bool = False
    expert_bias: bool = False
    prefix: str = "mlp.experts"
    shared_size: str = ""
    shared_count: str = ""
    shared: str = "mlp.shared_expert"
    shared_gate: str = ""


@dataclass(frozen=True)
class Architecture:
    """One row of the table. See the module's docstring for flags."""

    stack: str = "model.layers"
    block: str = "LlamaDecoderLayer"
    hidden: tuple[str, ...] = ("hidden_size",)
    layers: tuple[str, ...] = ("num_hidden_layers",)
    heads: tuple[str, ...] = ("num_attention_heads",)
    kv_heads: tuple[str, ...] = ("num_key_value_heads",)
    head_dim: tuple[str, ...] = ("head_dim",)
    ffn: tuple[str, ...] = ("intermediate_size",)
    ffn_factor: str = ""  # field with ffn / hidden, where the config has no ffn; "4" for a constant
    vocab: tuple[str, ...] = ("vocab_size",)
    positions: tuple[str, ...] = ("max_position_embeddings",)
    attention: AttentionNames = AttentionNames()
    mlp: MlpNames = MlpNames()
    multi_query: str = ""  # field that says there is one key-value head
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_gated: bool = True
    mlp_bias: Flag = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm_weight: Flag = True
    norm_bias: Flag = False
    qk_norm: str = ""  # "head", "full" (whole projected width), "per_head" (heads x head_dim)
    qk_norm_if: Flag = True
    qk_norm_names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    splits_heads: bool = True  # the packing of attention lets tp take whole heads
    sinks: str = ""
    parallel_residual: Flag = False
    serial_norms: tuple[str, ...] = ()  # norms in place of `norms` where the residual is serial
    window: str = "none"  # "none", "all", or a pattern: see build.window_of
    window_field: str = "sliding_window"
    window_if: Flag = True
    word: str = "model.embed_tokens"
    word_width: str = ""  # field with the word embedding's width, where it is projected
    position: str = ""
    position_offset: int = 0
    position_if: Flag = True
    embedding_norm: str = ""
    final_norm: str = "model.norm"
    final_norm_if: Flag = True
    head_bias: Flag = False
    tied: bool = False
    experts: Experts | None = None
    latent: bool = False  # multi-head latent attention
    new_decoder: str = ""  # falcon: field that turns on grouped kv heads and two norms

    def synonyms(self) -> tuple[tuple[str, ...], ...]:
        """Config fields of which one stands for another: stating one overrules all defaults."""
        groups = [self.hidden, self.layers, self.heads, self.kv_heads, self.ffn, self.positions]
        if self.experts:
            groups += [self.experts.count, self.experts.top_k]
        return tuple(names for names in groups if len(names) > 1)

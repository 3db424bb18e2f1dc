"""What each Hugging Face `model_type` looks like: one table row per type, no code per type.

A row says which config fields hold the sizes, how attention and MLP are laid out, what the modules
are called, which norms a block has and where biases are. :mod:`ds_autoplan.model.build` turns a row
and a config into a :class:`~ds_autoplan.model.graph.BlockGraph`. Parameter counts are tested
against the Hugging Face classes of transformers 5.24, built on the meta device.

A *flag* in a row is True, False, or the name of a config field that says which ("!name" inverts
it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


LLAMA = Architecture()
_SHARED_GLM = Experts(
    count=("n_routed_experts", "num_local_experts"),
    width="moe_intermediate_size",
    layers="first_dense",
    shared_count="n_shared_experts",
    shared="mlp.shared_experts",
)
_GPT2 = Architecture(
    stack="transformer.h",
    block="GPT2Block",
    hidden=("n_embd", "hidden_size"),
    layers=("n_layer", "num_hidden_layers"),
    heads=("n_head", "num_attention_heads"),
    ffn=("n_inner",),
    ffn_factor="4",
    positions=("n_positions", "max_position_embeddings"),
    attention=AttentionNames(q="", k="", v="", qkv="attn.c_attn", out="attn.c_proj"),
    mlp=MlpNames(gate="", up="mlp.c_fc", down="mlp.c_proj"),
    kv_heads=(),
    head_dim=(),
    qkv_bias=True,
    out_bias=True,
    mlp_gated=False,
    mlp_bias=True,
    norms=("ln_1", "ln_2"),
    norm_bias=True,
    word="transformer.wte",
    position="transformer.wpe",
    final_norm="transformer.ln_f",
    tied=True,
)
_GEMMA2 = replace(
    LLAMA,
    block="Gemma2DecoderLayer",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norms=(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    window="pattern:2",
    tied=True,
)
_FUSED_HEADS = AttentionNames(
    q="",
    k="",
    v="",
    qkv="self_attention.query_key_value",
    out="self_attention.dense",
)
_FOUR_H = MlpNames(gate="", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
_FUSED_GATE = MlpNames(gate="", up="", gate_up="mlp.gate_up_proj", down="mlp.down_proj")
_COHERE = replace(
    LLAMA,
    block="CohereDecoderLayer",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norms=("input_layernorm",),
    qk_norm="per_head",
    qk_norm_if="use_qk_norm",
    parallel_residual=True,
    tied=True,
)
_OLMO2 = replace(
    LLAMA,
    block="Olmo2DecoderLayer",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    qk_norm="full",
)
_GLM = replace(
    LLAMA,
    block="GlmDecoderLayer",
    mlp=_FUSED_GATE,
    qkv_bias="attention_bias",
)
_QWEN3 = replace(
    LLAMA,
    block="Qwen3DecoderLayer",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    qk_norm="head",
    window="from:max_window_layers",
    window_if="use_sliding_window",
)
_DEEPSEEK_V2 = replace(
    LLAMA,
    block="DeepseekV2DecoderLayer",
    latent=True,
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    experts=_SHARED_GLM,
)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": replace(
        LLAMA, qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "mistral": replace(LLAMA, block="MistralDecoderLayer", window="all"),
    "qwen2": replace(
        LLAMA,
        block="Qwen2DecoderLayer",
        qkv_bias=True,
        window="from:max_window_layers",
        window_if="use_sliding_window",
    ),
    "qwen3": _QWEN3,
    "gemma": replace(
        LLAMA,
        block="GemmaDecoderLayer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        tied=True,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        block="Gemma3DecoderLayer",
        qk_norm="head",
        window="pattern:sliding_window_pattern:6",
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, block="GPTBigCodeBlock", multi_query="multi_query"),
    "gptj": replace(
        _GPT2,
        block="GPTJBlock",
        attention=AttentionNames(
            q="attn.q_proj", k="attn.k_proj", v="attn.v_proj", out="attn.out_proj"
        ),
        mlp=MlpNames(gate="", up="mlp.fc_in", down="mlp.fc_out"),
        qkv_bias=False,
        out_bias=False,
        norms=("ln_1",),
        parallel_residual=True,
        position="",
        head_bias=True,
        tied=False,
    ),
    "codegen": replace(
        _GPT2,
        block="CodeGenBlock",
        attention=AttentionNames(q="", k="", v="", qkv="attn.qkv_proj", out="attn.out_proj"),
        mlp=MlpNames(gate="", up="mlp.fc_in", down="mlp.fc_out"),
        qkv_bias=False,
        out_bias=False,
        norms=("ln_1",),
        parallel_residual=True,
        position="",
        head_bias=True,
        tied=False,
    ),
    "gpt_neo": replace(
        _GPT2,
        block="GPTNeoBlock",
        hidden=("hidden_size",),
        layers=("num_layers",),
        heads=("num_heads",),
        ffn=("intermediate_size",),
        positions=("max_position_embeddings",),
        attention=AttentionNames(
            q="attn.attention.q_proj",
            k="attn.attention.k_proj",
            v="attn.attention.v_proj",
            out="attn.attention.out_proj",
        ),
        qkv_bias=False,
        window="attention_types",
        window_field="window_size",
    ),
    "gpt_neox": Architecture(
        stack="gpt_neox.layers",
        block="GPTNeoXLayer",
        kv_heads=(),
        head_dim=(),
        attention=AttentionNames(
            q="", k="", v="", qkv="attention.query_key_value", out="attention.dense"
        ),
        mlp=_FOUR_H,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_gated=False,
        mlp_bias=True,
        norm_bias=True,
        parallel_residual="use_parallel_residual",
        word="gpt_neox.embed_in",
        final_norm="gpt_neox.final_layer_norm",
    ),
    "opt": Architecture(
        stack="model.decoder.layers",
        block="OPTDecoderLayer",
        kv_heads=(),
        head_dim=(),
        ffn=("ffn_dim",),
        attention=AttentionNames(out="self_attn.out_proj"),
        mlp=MlpNames(gate="", up="fc1", down="fc2"),
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        mlp_gated=False,
        mlp_bias="enable_bias",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        norm_weight="layer_norm_elementwise_affine",
        norm_bias="layer_norm_elementwise_affine",
        word="model.decoder.embed_tokens",
        word_width="word_embed_proj_dim",
        position="model.decoder.embed_positions",
        position_offset=2,
        final_norm="model.decoder.final_layer_norm",
        final_norm_if="do_layer_norm_before",
        tied=True,
    ),
    "phi": replace(
        LLAMA,
        block="PhiDecoderLayer",
        attention=AttentionNames(out="self_attn.dense"),
        mlp=MlpNames(gate="", up="mlp.fc1", down="mlp.fc2"),
        qkv_bias=True,
        out_bias=True,
        mlp_gated=False,
        mlp_bias=True,
        norms=("input_layernorm",),
        norm_bias=True,
        qk_norm="head",
        qk_norm_if="qk_layernorm",
        qk_norm_names=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        parallel_residual=True,
        final_norm="model.final_layernorm",
        head_bias=True,
    ),
    "phi3": replace(
        LLAMA,
        block="Phi3DecoderLayer",
        attention=AttentionNames(q="", k="", v="", qkv="self_attn.qkv_proj"),
        mlp=_FUSED_GATE,
        window="all",
    ),
    "bloom": Architecture(
        stack="transformer.h",
        block="BloomBlock",
        hidden=("hidden_size", "n_embed"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
        kv_heads=(),
        head_dim=(),
        ffn=(),
        ffn_factor="4",
        positions=(),
        attention=_FUSED_HEADS,
        mlp=_FOUR_H,
        qkv_bias=True,
        out_bias=True,
        mlp_gated=False,
        mlp_bias=True,
        norm_bias=True,
        word="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        final_norm="transformer.ln_f",
        tied=True,
    ),
    "falcon": Architecture(
        stack="transformer.h",
        block="FalconDecoderLayer",
        layers=("num_hidden_layers", "n_layer"),
        heads=("num_attention_heads", "n_head"),
        kv_heads=("num_kv_heads", "n_head_kv"),
        head_dim=(),
        ffn=("ffn_hidden_size",),
        ffn_factor="4",
        attention=_FUSED_HEADS,
        mlp=_FOUR_H,
        multi_query="multi_query",
        qkv_bias="bias",
        out_bias="bias",
        mlp_gated=False,
        mlp_bias="bias",
        norms=("input_layernorm",),
        serial_norms=("input_layernorm", "post_attention_layernorm"),
        norm_bias=True,
        parallel_residual="parallel_attn",
        new_decoder="new_decoder_architecture",
        word="transformer.word_embeddings",
        final_norm="transformer.ln_f",
        tied=True,
    ),
    "mpt": Architecture(
        stack="transformer.blocks",
        block="MptBlock",
        hidden=("d_model",),
        layers=("n_layers",),
        heads=("n_heads",),
        kv_heads=(),
        head_dim=(),
        ffn=(),
        ffn_factor="4",  # transformers ignores expansion_ratio
        positions=("max_seq_len",),
        attention=AttentionNames(q="", k="", v="", qkv="attn.Wqkv", out="attn.out_proj"),
        mlp=MlpNames(gate="", up="ffn.up_proj", down="ffn.down_proj"),
        mlp_gated=False,
        norms=("norm_1", "norm_2"),
        word="transformer.wte",
        final_norm="transformer.norm_f",
        tied=True,
    ),
    "stablelm": replace(
        LLAMA,
        block="StableLmDecoderLayer",
        qkv_bias="use_qkv_bias",
        norms=("input_layernorm",),
        serial_norms=("input_layernorm", "post_attention_layernorm"),
        norm_bias=True,
        qk_norm="per_head",
        qk_norm_if="qk_layernorm",
        qk_norm_names=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        parallel_residual="use_parallel_residual",
    ),
    "starcoder2": replace(
        LLAMA,
        block="Starcoder2DecoderLayer",
        mlp=MlpNames(gate="", up="mlp.c_fc", down="mlp.c_proj"),
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_gated=False,
        mlp_bias="use_bias",
        norm_bias=True,
        window="all",
        tied=True,
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE, block="Cohere2DecoderLayer", qk_norm="", window="pattern:sliding_window_pattern:4"
    ),
    "olmo": replace(
        LLAMA,
        block="OlmoDecoderLayer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        norm_weight=False,
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, block="Olmo3DecoderLayer", window="pattern:4"),
    "granite": replace(
        LLAMA,
        block="GraniteDecoderLayer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "nemotron": replace(
        LLAMA,
        block="NemotronDecoderLayer",
        mlp=MlpNames(gate="", up="mlp.up_proj", down="mlp.down_proj"),
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_gated=False,
        mlp_bias="mlp_bias",
        norm_bias=True,
    ),
    "smollm3": replace(
        LLAMA,
        block="SmolLM3DecoderLayer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        tied=True,
    ),
    "exaone4": replace(
        LLAMA,
        block="Exaone4DecoderLayer",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        qk_norm="head",
        window="pattern:sliding_window_pattern:4",
    ),
    "ernie4_5": replace(
        LLAMA,
        block="Ernie4_5DecoderLayer",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        tied=True,
    ),
    "glm": _GLM,
    "glm4": replace(
        _GLM,
        block="Glm4DecoderLayer",
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
        ),
    ),
    "mixtral": replace(LLAMA, block="MixtralDecoderLayer", window="all", experts=Experts()),
    "qwen2_moe": replace(
        LLAMA,
        block="Qwen2MoeDecoderLayer",
        qkv_bias="qkv_bias",
        window="pattern_until:max_window_layers",
        window_if="use_sliding_window",
        experts=Experts(
            width="moe_intermediate_size",
            layers="step",
            shared_size="shared_expert_intermediate_size",
            shared_gate="mlp.shared_expert_gate",
        ),
    ),
    "qwen3_moe": replace(
        _QWEN3,
        block="Qwen3MoeDecoderLayer",
        window="all",
        experts=Experts(width="moe_intermediate_size", layers="step"),
    ),
    "olmoe": replace(
        LLAMA,
        block="OlmoeDecoderLayer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="full",
        experts=Experts(),
    ),
    "phimoe": replace(
        LLAMA,
        block="PhimoeDecoderLayer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        norm_bias=True,
        head_bias="lm_head_bias",
        window="all",
        experts=Experts(router="mlp.router"),
    ),
    "glm4_moe": replace(
        LLAMA,
        block="Glm4MoeDecoderLayer",
        qkv_bias="attention_bias",
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        experts=_SHARED_GLM,
    ),
    "gpt_oss": replace(
        LLAMA,
        block="GptOssDecoderLayer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        sinks="self_attn.sinks",
        window="pattern:2",
        experts=Experts(router="mlp.router", router_bias=True, expert_bias=True),
    ),
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": replace(_DEEPSEEK_V2, block="DeepseekV3DecoderLayer", mlp_bias=False),
}

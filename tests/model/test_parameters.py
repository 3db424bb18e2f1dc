"""Parameter counts and module names equal those of the Hugging Face classes, built on meta."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ds_autoplan.model import BlockGraph, bundled_models, load_graph, supported_model_types
from ds_autoplan.model.architectures import ARCHITECTURES
from ds_autoplan.model.load import _DATA

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES: dict[str, int] = {"vocab_size": 517, "pad_token_id": 0}
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

# model_type -> changes to the default config, each another corner of the row
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        {"hidden_size": 96, "num_attention_heads": 6, "head_dim": 24, "tie_word_embeddings": True},
    ],
    "mistral": [{"sliding_window": None, "head_dim": 64}],
    "qwen2": [{"num_key_value_heads": 2, "tie_word_embeddings": True}],
    "qwen3": [{"num_key_value_heads": 8, "attention_bias": True, "head_dim": 64}],
    "gemma": [{"tie_word_embeddings": False, "num_key_value_heads": 1}],
    "gemma2": [{"head_dim": 128, "attention_bias": True}],
    "gemma3_text": [{"num_key_value_heads": 1}],
    "gpt2": [{"n_inner": 1000}, {"tie_word_embeddings": False, "n_positions": 77}],
    "gpt_bigcode": [{"multi_query": False}],
    "gpt_neo": [{"intermediate_size": 300, "attention_types": [[["global", "local"], 3]]}],
    "gpt_neox": [{"attention_bias": False, "use_parallel_residual": False}],
    "opt": [
        {"word_embed_proj_dim": 512, "do_layer_norm_before": False},
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        {"tie_word_embeddings": False},
    ],
    "phi": [{"qk_layernorm": True, "num_key_value_heads": 8}],
    "phi3": [{"num_key_value_heads": 8, "tie_word_embeddings": True}],
    "bloom": [{"hidden_size": 128, "n_head": 4}],
    "falcon": [
        {"hidden_size": 512, "num_attention_heads": 8, "num_kv_heads": 2},
        {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
        },
        {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
        },
        {"hidden_size": 512, "num_attention_heads": 8, "multi_query": False, "bias": True},
        {"hidden_size": 512, "num_attention_heads": 8, "parallel_attn": False},
    ],
    "mpt": [{"d_model": 256, "n_heads": 4}],
    "stablelm": [
        {"use_qkv_bias": True, "num_key_value_heads": 8},
        {"qk_layernorm": True, "use_parallel_residual": True},
    ],
    "jamba": [
        {"num_experts": 1, "attn_layer_period": 3, "attn_layer_offset": 1},
        {"mamba_proj_bias": True, "mamba_dt_rank": 7, "tie_word_embeddings": True},
    ],
    "lfm2": [
        {"layer_types": ["conv", "full_attention", "conv"] * 2, "conv_bias": True},
        {"full_attn_idxs": [2], "block_auto_adjust_ff_dim": False},
    ],
    "starcoder2": [{"use_bias": False, "tie_word_embeddings": False}],
    "cohere": [{"use_qk_norm": True, "num_key_value_heads": 8}],
    "olmo2": [{"num_key_value_heads": 8, "attention_bias": True}],
    "olmo3": [{"num_key_value_heads": 8}],
    "granite": [{"mlp_bias": True, "num_key_value_heads": 8}],
    "nemotron": [{"attention_bias": True, "mlp_bias": True}],
    "smollm3": [{"attention_bias": True}],
    "glm4": [{"attention_bias": False}],
    "mixtral": [{"num_local_experts": 3, "sliding_window": 128}],
    "qwen2_moe": [
        {"decoder_sparse_step": 2, "num_experts": 4},
        {"mlp_only_layers": [1], "num_experts": 4, "qkv_bias": False},
    ],
    "qwen3_moe": [{"mlp_only_layers": [0, 2], "num_experts": 4, "head_dim": 32}],
    "olmoe": [{"num_experts": 4, "num_key_value_heads": 4}],
    "phimoe": [{"lm_head_bias": True, "attention_bias": True, "num_local_experts": 4}],
    "glm4_moe": [
        {"use_qk_norm": True, "attention_bias": True, "n_routed_experts": 4, "n_group": 1}
    ],
    "gpt_oss": [{"num_local_experts": 4, "attention_bias": False}],
    "deepseek_v2": [{"q_lora_rank": None, "n_routed_experts": 4, "first_k_dense_replace": 1}],
    "deepseek_v3": [{"q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2}],
    "bert": [{"type_vocab_size": 3, "tie_word_embeddings": False}],
    "t5": [
        {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        {"num_decoder_layers": 2, "d_kv": 32},
    ],
    "vit": [{"qkv_bias": False, "image_size": 96}],
    "swin": [{"qkv_bias": False, "use_absolute_embeddings": True, "depths": [1, 2, 3, 1]}],
}
# what a default config needs before transformers itself, or planning, can use it
COMPLETE: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 128},
    "qwen3_moe": {"num_experts_per_tok": 2},
}


def build_on_meta(config: dict[str, Any], **how: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plain = dict(config)
    made = CONFIG_MAPPING[plain.pop("model_type")](**plain)
    factory = {
        "bert": transformers.AutoModelForMaskedLM,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "vit": transformers.AutoModelForImageClassification,
        "swin": transformers.AutoModelForImageClassification,
    }.get(made.model_type, transformers.AutoModelForCausalLM)
    with torch.device("meta"):
        return factory.from_config(made, **how)


def small(model_type: str, changes: dict[str, Any]) -> dict[str, Any]:
    defaults = json.loads((_DATA / "hf_defaults.json").read_text())[model_type]
    config = {"model_type": model_type, **COMPLETE.get(model_type, {})}
    for key in LAYER_KEYS:
        if key in defaults and model_type != "swin":
            config[key] = 6
    if model_type == "gpt_neo":
        config["attention_types"] = [[["global", "local"], 3]]
    if "vocab_size" in defaults:
        config.update(SIZES)
    return {**config, **changes}


CASES = [(name, {}) for name in supported_model_types()] + [
    (name, changes) for name, variants in VARIANTS.items() for changes in variants
]


@pytest.mark.parametrize(
    ("model_type", "changes"), CASES, ids=[f"{n}-{'-'.join(c) or 'default'}" for n, c in CASES]
)
def test_count_and_names_equal_the_hugging_face_model(
    model_type: str, changes: dict[str, Any]
) -> None:
    config = small(model_type, changes)
    graph = load_graph(config)
    model = build_on_meta(config)
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    names = {name for name, _ in model.named_modules()} | {n for n, _ in model.named_parameters()}
    if model_type == "swin":  # the merging of patches belongs to the stage, after its last block
        names |= {
            re.sub(r"(layers\.\d+)", rf"\1.blocks.{n}", name) for name in names for n in range(9)
        }
    assert not [name for name in operator_names(graph) if name not in names]
    assert set(graph.layer_names) <= names


def operator_names(graph: BlockGraph) -> list[str]:
    """Dotted names of everything with parameters, in every layer."""
    found = [o.name for o in graph.embedding + graph.head if o.num_parameters]
    for index, klass in enumerate(graph.layers):
        stem = graph.layer_names[index]
        for operator in graph.classes[klass].operators:
            if operator.num_parameters and operator.name != "encoder.final_layer_norm":
                found.append(f"{stem}.{operator.name}")
    return found


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2", "bloom-560m", "falcon-7b", "opt-1.3b"])
def test_bundled_counts_equal_the_hugging_face_model(name: str) -> None:
    config = bundled_models()[name]
    count = sum(p.numel() for p in build_on_meta(config).parameters())
    assert load_graph(name).num_parameters == count


# Published totals: model cards and papers; the last digit given is the precision.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "falcon-7b": 6_921_720_704,
    "bloom-176b": 176_247_271_424,
    "gpt2-xl": 1_557_611_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "gemma-2b": 2_506_172_416,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_bundled_counts_equal_the_published_ones(name: str) -> None:
    assert load_graph(name).num_parameters == PUBLISHED[name]


def test_defaults_are_those_of_transformers() -> None:
    import dataclasses

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    stored = json.loads((_DATA / "hf_defaults.json").read_text())
    for model_type, values in stored.items():
        fields = {f.name: f.default for f in dataclasses.fields(CONFIG_MAPPING[model_type])}
        for key, value in values.items():
            if key in fields and fields[key] is not dataclasses.MISSING:
                expected = fields[key]
                if isinstance(expected, tuple):
                    expected = list(expected)
                if isinstance(value, list) and expected is None:
                    continue
                assert value == expected, (model_type, key)


def test_every_row_has_defaults_and_every_type_is_tested() -> None:
    stored = json.loads((_DATA / "hf_defaults.json").read_text())
    assert set(supported_model_types()) <= set(stored) | {"nemotron"}
    assert set(ARCHITECTURES) <= {name for name, _ in CASES}

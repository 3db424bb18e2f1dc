"""Graphs read off modules, against graphs read off configs and the parameter counts of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_autoplan.integrations.transformers.graph_of_modules import (
    graph_of_modules,
    graph_of_structure,
)
from ds_autoplan.integrations.transformers.structure import analyse
from torch import nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.model.load import graph_of_config

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 101, "n_positions": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "mistral": TINY,
    "qwen2": TINY,
    "qwen3": TINY,
    "gemma": TINY,
    "gemma2": TINY,
    "gpt_neox": TINY,
    "phi": TINY,
    "phi3": TINY | {"original_max_position_embeddings": 64},
    "starcoder2": TINY,
    "gpt2": GPT2,
    "opt": TINY | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 101},
}
NOT_OFFLINE = {
    "gpt_bigcode": GPT2,
    "xglm": {
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "vocab_size": 101,
    },
    "biogpt": TINY,
}


def _model(model_type: str, config: dict[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))


def _content(graph: Any) -> list[tuple[Any, ...]]:
    """What pricing reads of the blocks: names and order do not matter."""
    return sorted(
        (o.kind, o.role, o.in_features, o.out_features, o.num_parameters)
        for index in graph.layers
        for o in graph.classes[index].operators
        if o.num_parameters
    )


@pytest.mark.parametrize("model_type", CONFIGS)
def test_modules_and_config_give_the_same_blocks(model_type: str) -> None:
    model = _model(model_type, CONFIGS[model_type])
    read = graph_of_structure(analyse(model))
    table = graph_of_config(model.config.to_dict(), model_type)
    rename = {"qk_norm": "norm"}
    expected = [(k, rename.get(r, r), *rest) for k, r, *rest in _content(table)]
    assert _content(read) == sorted(expected)
    assert [read.classes[i].attention for i in read.layers][0].num_kv_heads == (
        [table.classes[i].attention for i in table.layers][0].num_kv_heads
    )
    assert read.num_parameters == table.num_parameters


@pytest.mark.parametrize("model_type", CONFIGS | NOT_OFFLINE)
def test_every_weight_is_counted_once(model_type: str) -> None:
    model = _model(model_type, (CONFIGS | NOT_OFFLINE)[model_type])
    total = sum(parameter.numel() for parameter in model.parameters())
    assert graph_of_structure(analyse(model)).num_parameters == total
    assert graph_of_modules(model, "test").num_parameters == total


def test_a_model_that_is_not_recognised_is_not_split() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    with pytest.raises(UnsupportedError, match="not a Hugging Face model"):
        analyse(Blocks())
    graph = graph_of_modules(Blocks(), "no idea")
    assert graph.num_layers == 3 and len(graph.classes) == 1
    assert graph.tensor_refusal == graph.pipeline_refusal == "no idea"


def test_an_unknown_weight_in_a_block_refuses_tensor_parallelism_by_name() -> None:
    model = _model("llama", TINY)
    model.model.layers[1].mlp.extra = nn.Linear(32, 32)
    assert "model.layers.1.mlp.extra" in analyse(model).tensor_refusal


def test_a_declared_style_that_contradicts_the_structure_refuses() -> None:
    model = _model("llama", TINY)
    for holder in (model.base_model, model):
        holder._tp_plan = {"model.layers.*.self_attn.q_proj": "rowwise"}
    assert "declared rowwise" in analyse(model).tensor_refusal

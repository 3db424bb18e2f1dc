"""Graphs read off modules, against graphs read off configs and the parameter counts of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_autoplan.integrations.transformers.graph_of_modules import (
    graph_of_modules,
    graph_of_structure,
)
from ds_autoplan.integrations.transformers.stock import embedding_factor
from ds_autoplan.integrations.transformers.structure import analyse
from ds_autoplan.integrations.verification.small import small_config
from ds_autoplan.integrations.verification.training import Job, build_model
from torch import nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.model.architectures import ARCHITECTURES
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
    "xglm": {
        "d_model": 32,
        "ffn_dim": 48,
        "num_layers": 2,
        "attention_heads": 4,
        "vocab_size": 101,
    },
    "biogpt": TINY,
    "persimmon": TINY,
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 101},
}
NOT_OFFLINE = {
    "gpt_bigcode": GPT2,
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


DENSE = sorted(
    name for name, row in ARCHITECTURES.items() if row.experts is None and not row.latent
)


@pytest.mark.parametrize("model_type", DENSE)
def test_offline_plans_split_what_the_runtime_splits(model_type: str) -> None:
    config = small_config({"model_type": model_type}, model_type, 2, 2, {})
    job = Job(config, world=4, accumulation=1, steps=1, samples=1, seq_length=8)
    structure = analyse(build_model(job))
    table = graph_of_config(config, model_type)
    assert structure.tensor_refusal == table.tensor_refusal == ""
    assert structure.pipeline_refusal == table.pipeline_refusal == ""
    for block, index in zip(structure.blocks, table.layers, strict=True):
        assert block.attention is not None and block.mlp is not None
        expected = {"attention", "mlp"} if block.attention.shardable else {"mlp"}
        assert table.classes[index].shardable == expected


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


class Doubled(nn.Linear):
    """A linear that does more than its weight says, as adapters do."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Twice the product."""
        return 2 * super().forward(given)


class Renamed(nn.Linear):
    """A linear with a forward of its own that is a plain product (as Falcon's)."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """The product."""
        return given @ self.weight.t()


def test_a_linear_that_does_more_than_its_weight_says_is_not_replaced() -> None:
    for kind, refused in ((Doubled, True), (Renamed, False)):
        model = _model("llama", TINY)
        model.model.layers[1].mlp.up_proj = kind(32, 48, bias=False)
        refusal = analyse(model).tensor_refusal
        assert ("model.layers.1.mlp.up_proj: Doubled computes something else" in refusal) == refused
        assert bool(refusal) == refused


def test_an_embedding_that_does_more_than_scale_is_not_split() -> None:
    class Shifted(nn.Embedding):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) + 1

    model = _model("llama", TINY)
    model.set_input_embeddings(Shifted(101, 32))
    assert "model.embed_tokens: Shifted computes something else" in analyse(model).tensor_refusal


def test_the_factor_of_a_scaled_embedding_is_known() -> None:
    for model_type, rounded in (("biogpt", False), ("gemma3_text", True), ("llama", None)):
        factor, refusal = embedding_factor(_model(model_type, TINY).get_input_embeddings())
        assert refusal == ""
        expected = None if rounded is None else 32**0.5
        assert (factor is None) == (expected is None)
        if factor is not None:
            assert isinstance(factor, torch.Tensor) == rounded
            assert float(factor) == pytest.approx(expected)

"""The block graph and the activation table against torch: FLOPs counted, saved tensors hooked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.estimate import even_cut
from ds_autoplan.model import BlockGraph, load_graph, supported_model_types
from ds_autoplan.model.architectures import ARCHITECTURES
from ds_autoplan.model.flops import forward_flops, keys_seen
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.workload import Workload
from tests.model.test_parameters import build_on_meta, small

BATCH, LENGTH, LAYERS = 2, 256, 3
LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
NEOX = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 8}
GPT = {
    "n_embd": 128,
    "n_head": 8,
    "n_inner": 344,
    "resid_pdrop": 0,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
}
# Widths that let mixtures run on a CPU.
NARROW: dict[str, dict[str, Any]] = {
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
    },
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": {**LLAMA, "head_dim": 16},
    "gemma": {**LLAMA, "head_dim": 16},
    "gpt2": {**GPT, "n_layer": LAYERS},
    "gpt_neox": NEOX,
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 344,
        "num_attention_heads": 8,
        "word_embed_proj_dim": 128,
        "dropout": 0.0,
    },
    "phi": {**NEOX, "resid_pdrop": 0.0},
    "phi3": {**LLAMA, **TOKENS},
    "starcoder2": {**LLAMA, **TOKENS, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "stablelm": LLAMA,
    "olmo2": {**LLAMA, **TOKENS},
    "cohere": {**LLAMA, **TOKENS},
    "granite": LLAMA,
    "gptj": {**GPT, "n_layer": LAYERS, "rotary_dim": 8},
}


def _experts(model_type: str) -> bool:
    return (
        model_type == "jamba"
        or model_type in ARCHITECTURES
        and ARCHITECTURES[model_type].experts is not None
    )


def build(model_type: str) -> Any:
    sizes = dict(MODELS[model_type])
    if "n_layer" not in sizes:
        sizes["num_hidden_layers"] = LAYERS
    return AutoConfig.for_model(model_type, vocab_size=1000, **sizes)


@pytest.mark.parametrize("model_type", MODELS)
def test_flops_are_those_that_torch_counts(model_type: str) -> None:
    config = build(model_type)
    # Torch does not count the CPU's fused attention; the eager one is plain products.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    graph = load_graph(config.to_dict())
    # Torch counts the whole score matrix, ours what the causal mask leaves: add the other half.
    masked_away = sum(
        2.0 * a.num_heads * (a.head_dim + a.value_head_dim) * LENGTH / 2 * LENGTH
        for a in (graph.classes[index].attention for index in graph.layers)
        if a is not None
    )
    ours = BATCH * (forward_flops(graph, LENGTH) + masked_away)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def counted_on_meta(config: dict[str, Any], model: Any) -> tuple[float, int]:
    """(FLOPs of a forward pass of BATCH samples, tokens of a sample), no memory used."""
    kind, made = config["model_type"], model.config
    if kind in ("vit", "swin"):
        size, patch = made.image_size, made.patch_size
        inputs = {"pixel_values": torch.zeros(BATCH, 3, size, size, device="meta")}
        length = (size // patch) ** 2 + (kind == "vit")
    else:
        ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
        inputs, length = {"input_ids": ids}, LENGTH
        if kind == "t5":
            inputs["decoder_input_ids"] = ids
        elif kind not in ("bert", "bloom", "mpt", "opt", "xglm", "biogpt"):
            # a mask of its own keeps the model from asking what the one it makes would hold
            inputs["attention_mask"] = torch.zeros(BATCH, 1, LENGTH, LENGTH, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs, **({} if kind in ("vit", "swin", "bert") else {"use_cache": False}))
    return counter.get_total_flops(), length


def unmasked_flops(graph: BlockGraph, length: int) -> float:
    """Forward FLOPs of a sample with whole score matrices: torch counts them, masks or not."""
    total = forward_flops(graph, length)
    for block in (graph.classes[index] for index in graph.layers):
        tokens = length * block.token_fraction
        if block.attention is not None and block.attention.causal:
            size = block.attention.head_dim + block.attention.value_head_dim
            hidden = tokens - keys_seen(block.attention, tokens)
            total += 2.0 * block.attention.num_heads * size * hidden * tokens
    return total


@pytest.mark.parametrize(
    "model_type", [name for name in supported_model_types() if not _experts(name)]
)
def test_flops_of_every_architecture_on_meta(model_type: str) -> None:
    config = small(model_type, {})
    model = build_on_meta(config, attn_implementation="eager")
    counted, length = counted_on_meta(config, model)
    ours = BATCH * unmasked_flops(load_graph(config), length)
    assert ours == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("model_type", [name for name in supported_model_types() if _experts(name)])
def test_flops_of_every_mixture(model_type: str) -> None:
    """On the CPU: which tokens an expert gets is data, and its products are counted one by one."""
    config = {**small(model_type, {}), **NARROW.get(model_type, {}), **NARROW[""]}
    made = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(
        made, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.randint(0, 500, (BATCH, LENGTH))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False)
    ours = BATCH * unmasked_flops(load_graph(config), LENGTH)
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", MODELS)
def test_activations_are_those_that_autograd_saves(model_type: str, precision: str) -> None:
    torch.manual_seed(0)
    config = build(model_type)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            # Holding the tensor keeps its address from being used again.
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.randint(0, 1000, (BATCH, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    measured = sum(size for size, _ in saved.values())

    graph = load_graph(config.to_dict())
    workload = Workload(seq_length=LENGTH, global_batch_size=BATCH, precision=precision)
    cost = AnalyticCostModel(graph, parse_cluster("1x1xCPU"), workload)
    degrees = Degrees(micro_batch_size=BATCH)
    estimate = cost.step(degrees, even_cut(LAYERS, 1, Strategy()), "shard")
    waste = 1.0 + cost.framework.wasted(1)
    assert estimate.stages[0].memory["activations"] / waste == pytest.approx(measured, rel=0.03)

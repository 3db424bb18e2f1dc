"""Folding of Hugging Face module trees."""

from __future__ import annotations

from typing import Any

import pytest

from ds_autoplan.model import load_graph
from ds_autoplan.model.fold import FoldReport, fingerprint, fold_modules
from tests.model.test_parameters import build_on_meta, small

torch = pytest.importorskip("torch")


def folded(model_type: str, **changes: Any) -> FoldReport:
    return fold_modules(build_on_meta(small(model_type, changes)))


@pytest.mark.parametrize(
    ("model_type", "stack", "classes"),
    [
        ("llama", "model.layers", 1),
        ("gpt2", "transformer.h", 1),
        ("bloom", "transformer.h", 1),
        ("gemma2", "model.layers", 1),  # windows differ, structure does not
        ("bert", "bert.encoder.layer", 1),
        ("vit", "vit.layers", 1),
        ("mixtral", "model.layers", 1),
    ],
)
def test_stack_is_found(model_type: str, stack: str, classes: int) -> None:
    report = folded(model_type)
    assert report.stack == stack
    assert report.distinct_blocks == classes
    assert report.distinct_modules < report.modules


def test_dense_and_expert_layers_are_two_classes() -> None:
    report = folded("qwen3_moe", mlp_only_layers=[0, 2], num_experts=4)
    assert report.stack == "model.layers"
    assert report.block_classes == (0, 1, 0, 1, 1, 1)
    graph = load_graph(small("qwen3_moe", {"mlp_only_layers": [0, 2], "num_experts": 4}))
    assert graph.layers == report.block_classes


def test_distinct_modules_do_not_grow_with_depth() -> None:
    few, many = folded("llama", num_hidden_layers=4), folded("llama", num_hidden_layers=40)
    assert many.modules > 8 * few.modules
    # the list of layers is itself another structure, and so is what holds it
    assert many.distinct_modules == few.distinct_modules


def test_names_do_not_count_but_shapes_do() -> None:
    def block(names: tuple[str, str], width: int) -> Any:
        made = torch.nn.Module()
        setattr(made, names[0], torch.nn.Linear(8, width, device="meta"))
        setattr(made, names[1], torch.nn.LayerNorm(8, device="meta"))
        return made

    original = fingerprint(block(("fc", "norm"), 16))
    assert fingerprint(block(("linear", "ln"), 16)) == original
    assert fingerprint(block(("fc", "norm"), 24)) != original


def test_t5_has_first_and_other_blocks() -> None:
    report = folded("t5")
    assert report.stack in ("encoder.block", "decoder.block")
    assert report.distinct_blocks == 2  # relative positions in the first block only
    assert report.largest_class == 5

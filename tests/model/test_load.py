"""Finding a model, folding it, and refusing what cannot be read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ds_autoplan.errors import BadInputError, UnsupportedError
from ds_autoplan.model import bundled_models, load_graph
from ds_autoplan.model.flops import forward_flops, keys_seen, model_flops
from ds_autoplan.model.graph import Attention

LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100}
LLAMA |= {"num_hidden_layers": 3, "num_attention_heads": 4}


def test_dict_file_folder_and_name_give_the_same_graph(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    graphs = [load_graph(LLAMA, "tiny"), load_graph(folder), load_graph(folder / "config.json")]
    assert graphs[0] == graphs[1] == graphs[2]
    assert graphs[0].name == "tiny"
    assert load_graph("llama-2-7b").num_layers == 32


def test_equal_blocks_are_one_class_whatever_the_depth() -> None:
    for layers in (1, 12, 192):
        graph = load_graph({**LLAMA, "num_hidden_layers": layers})
        assert len(graph.classes) == 1
        assert graph.layers == (0,) * layers


def test_blocks_of_two_architectures_with_the_same_shapes_share_a_fingerprint() -> None:
    mistral = {**LLAMA, "model_type": "mistral", "sliding_window": None, "num_key_value_heads": 4}
    one, other = load_graph(LLAMA).classes[0], load_graph(mistral).classes[0]
    assert one.fingerprint == other.fingerprint
    wider = load_graph({**LLAMA, "intermediate_size": 256}).classes[0]
    assert wider.fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("model", "classes", "pattern"),
    [
        ("gemma-2-9b", 2, (0, 1, 0, 1, 0, 1)),  # sliding, full, sliding, ...
        ("gpt-oss-20b", 2, (0, 1, 0, 1, 0, 1)),
        ("deepseek-v3", 2, (0, 0, 0, 1, 1, 1)),  # three dense layers first
        ("mistral-7b", 1, (0, 0, 0)),
    ],
)
def test_alternating_layers_are_classes(model: str, classes: int, pattern: tuple[int, ...]) -> None:
    graph = load_graph(model)
    assert len(graph.classes) == classes
    assert graph.layers[: len(pattern)] == pattern


def test_layer_types_of_a_config_decide_the_windows() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    graph = load_graph(
        {**LLAMA, "model_type": "gemma3_text", "layer_types": kinds, "sliding_window": 16}
    )
    windows = [graph.classes[klass].attention.window for klass in graph.layers]  # type: ignore[union-attr]
    assert windows == [None, 16, 16]


def test_t5_is_one_chain_whose_encoder_feeds_every_decoder_block() -> None:
    graph = load_graph("t5-large")
    assert graph.num_layers == 48
    values = [edge for edge in graph.skip_edges if edge.elements_per_token]
    assert {edge.source for edge in values} == {23}
    assert [edge.target for edge in values] == list(range(24, 48))
    assert [edge.weight_elements for edge in graph.skip_edges if edge.weight_elements]


def test_swin_tokens_shrink_as_width_grows() -> None:
    graph = load_graph("swin-huge")
    first, last = graph.classes[graph.layers[0]], graph.classes[graph.layers[-1]]
    assert (first.hidden_size, last.hidden_size) == (320, 2560)
    assert (first.token_fraction, last.token_fraction) == (1.0, 1 / 64)


def test_unknown_model_type_is_named_with_a_way_out() -> None:
    with pytest.raises(UnsupportedError, match="'lama'.*Nearest: llama.*data parallelism"):
        load_graph({**LLAMA, "model_type": "lama"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "model_type None"),
        ({**LLAMA, "num_attention_heads": 7}, "multiple of the heads"),
        ({**LLAMA, "hidden_size": -4}, "hidden_size = -4.*positive integer"),
        ({**LLAMA, "num_hidden_layers": "three"}, "num_hidden_layers = 'three'"),
        ({**LLAMA, "hidden_size": True}, "hidden_size = True"),
    ],
)
def test_bad_configs_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        load_graph(config)


def test_missing_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="Did you mean .*llama-3-70b"):
        load_graph("llama3-70b")
    with pytest.raises(BadInputError, match=r"no config\.json"):
        load_graph(tmp_path)
    broken = tmp_path / "x.json"
    broken.write_text("{")
    with pytest.raises(BadInputError, match="not JSON"):
        load_graph(broken)
    broken.write_text("[1]")
    with pytest.raises(BadInputError, match="no JSON object"):
        load_graph(broken)


def test_every_bundled_model_loads() -> None:
    for name in bundled_models():
        graph = load_graph(name)
        assert graph.num_parameters > 1e8, name
        assert len(graph.layer_names) == graph.num_layers, name


def test_keys_seen() -> None:
    full = Attention(1, 1, 8, 8, causal=True)
    assert keys_seen(full, 100) == 50
    assert keys_seen(Attention(1, 1, 8, 8, causal=False), 100) == 100
    assert keys_seen(Attention(1, 1, 8, 8, window=200), 100) == 50
    # window 10 of 100: ten keys but for the first nine tokens, 10 - 10 * 9 / 200
    assert keys_seen(Attention(1, 1, 8, 8, window=10), 100) == pytest.approx(9.55)


def test_flops_of_a_llama_block_by_hand() -> None:
    graph = load_graph({**LLAMA, "num_key_value_heads": 2})
    h, f, v, s = 64, 128, 100, 10
    block = 2 * (h * h + 2 * h * h // 2 + h * h + 3 * h * f) + 2 * 4 * (16 + 16) * s / 2
    assert forward_flops(graph, s) == 3 * block * s + 2 * h * v * s
    assert model_flops(graph, s) == 3 * forward_flops(graph, s)


def test_loading_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from ds_autoplan.model import load_graph; load_graph('llama-3-405b');"
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'megatron', 'numpy', 'pydantic')"
        " if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    assert done.stdout.strip() == "[]"

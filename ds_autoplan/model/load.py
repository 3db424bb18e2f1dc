"""Reading a model: a config dict, a config.json, a model folder, or the name of a bundled one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_autoplan.errors import BadInputError, UnsupportedError
from ds_autoplan.model.architectures import ARCHITECTURES
from ds_autoplan.model.build import build_decoder
from ds_autoplan.model.encoders import BUILDERS as ENCODERS
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.model.hybrids import BUILDERS as HYBRIDS
from ds_autoplan.reading import MALFORMED, read_object

BUILDERS = {**ENCODERS, **HYBRIDS}
_DATA = Path(__file__).parent / "data"


def bundled_models() -> dict[str, dict[str, Any]]:
    """The bundled architectures by name, as Hugging Face config dicts (facts only, no weights)."""
    data: dict[str, dict[str, Any]] = json.loads(
        (_DATA / "bundled.json").read_text(encoding="utf-8")
    )
    return data


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s that :func:`load_graph` knows, sorted."""
    return tuple(sorted({*ARCHITECTURES, *BUILDERS}))


def load_graph(model: str | Path | Mapping[str, Any], name: str | None = None) -> BlockGraph:
    """The block graph of a model.

    Args:
        model: a Hugging Face config as a dict, the path of a config.json or of a folder that holds
            one, or the name of a bundled architecture ("llama-2-7b").
        name: display name; by default the bundled name, the folder's name or the model type.

    Raises:
        BadInputError: nothing is found under that name, or the config lacks what is needed.
        UnsupportedError: the `model_type` is not known.
    """
    config, found = read_config(model)
    return graph_of_config(config, name or found)


def read_config(model: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The Hugging Face config of a model (see :func:`load_graph`) and a display name.

    Raises:
        BadInputError: nothing is found under that name, or it is not a config.
    """
    if isinstance(model, Mapping):
        return model, str(model.get("model_type") or "model")
    bundled = bundled_models()
    if str(model) in bundled:
        return bundled[str(model)], str(model)
    path = Path(model)
    if len(str(model)) > 4096:  # longer than any path; the system would raise
        raise BadInputError("The model's name is longer than any path.")
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise BadInputError(
                f"The folder {str(model)!r} has no config.json.",
                "A model folder is one that save_pretrained wrote.",
            )
    if not path.is_file():
        near = difflib.get_close_matches(str(model).lower(), bundled, n=3, cutoff=0.4)
        hint = f"Did you mean {', '.join(near)}?" if near else f"Bundled: {', '.join(bundled)}."
        raise BadInputError(
            f"There is no model {str(model)!r}:",
            "it is neither a file, nor a folder with a config.json, nor a bundled architecture.",
            hint,
        )
    config = read_object(path, "model config")
    default = path.resolve().parent.name if path.name == "config.json" else path.stem
    return config, default or str(config.get("model_type"))


def graph_of_config(config: Mapping[str, Any], name: str) -> BlockGraph:
    """The block graph of a Hugging Face config dict.

    Keys that the config omits take transformers' defaults for its `model_type`.

    Raises:
        BadInputError: there is no `model_type`, or a size is missing or wrong.
        UnsupportedError: the `model_type` is not known.
    """
    complete = complete_config(config, name)
    model_type = complete["model_type"]
    try:
        if model_type in BUILDERS:
            return BUILDERS[model_type](complete, name)
        return build_decoder(complete, ARCHITECTURES[model_type], name)
    except MALFORMED as error:
        raise BadInputError(
            f"The config of {name!r} cannot be read as a {model_type!r} model: {error!r}.",
            "A key holds something that transformers would not take.",
            "Compare it with a config.json that save_pretrained wrote.",
        ) from error


def complete_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A Hugging Face config with transformers' defaults for the sizes that it omits.

    Raises:
        BadInputError: there is no `model_type`.
        UnsupportedError: the `model_type` is not known.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise BadInputError(
            f"The config of {name!r} has model_type {model_type!r}.",
            "A Hugging Face config names its architecture in model_type.",
            "Give the config.json that was saved with the model.",
        )
    known = supported_model_types()
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=3, cutoff=0.6)
        raise UnsupportedError(
            f"The model_type {model_type!r} of {name!r} is not known.",
            f"Known are: {', '.join(known)}.",
            (f"Nearest: {', '.join(near)}. " if near else "")
            + "Inside a training script the plugin reads the model's modules instead and plans "
            "data parallelism, ZeRO, activation checkpointing and the micro-batch size.",
        )
    defaults = json.loads((_DATA / "hf_defaults.json").read_text(encoding="utf-8"))
    missing = defaults.get(model_type, {})
    row = ARCHITECTURES.get(model_type)
    for names in row.synonyms() if row is not None else ():
        if any(config.get(key) is not None for key in names):
            missing = {key: value for key, value in missing.items() if key not in names}
    return {**missing, **config}

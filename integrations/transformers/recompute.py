"""Activation checkpointing of single blocks: "full" or "selective".

Full keeps the input of a block only, selective the inputs and outputs of its linear layers.

Selective recomputes the attention core (scores, softmax, weighted sum), which is what takes most
memory for little arithmetic. Models that call Transformers' attention interface get exactly that;
others (Bloom, Falcon) have the core in the middle of their attention module, so the whole module is
recomputed.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from ds_autoplan.integrations.transformers.structure import Block
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

PREFIX = "ds_autoplan_recomputed_"


def recompute(block: Block, mode: str) -> None:
    """Apply "none", "selective" or "full" to a block; Transformers' own switch is turned off."""
    if hasattr(block.module, "gradient_checkpointing"):
        block.module.gradient_checkpointing = False
    if mode == "full":
        block.module.forward = _checkpointed(block.module.forward)
    elif mode == "selective" and block.attention is not None:
        module = block.attention.module
        if _uses_attention_interface(module):
            _recompute_core(module)
        else:
            module.forward = _checkpointed(module.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # A cache keeps the keys of the first run: the second would see every token twice.
        args = tuple(_without_cache(value) for value in args)
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)

    return run


def _without_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


def _uses_attention_interface(attention: nn.Module) -> bool:
    names = type(attention).forward.__code__.co_names
    wrapped = getattr(type(attention).forward, "__wrapped__", None)
    if wrapped is not None:
        names += wrapped.__code__.co_names
    return "ALL_ATTENTION_FUNCTIONS" in names and hasattr(attention, "config")


def _recompute_core(attention: nn.Module) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    used = attention.config._attn_implementation
    if used.startswith(PREFIX):
        return
    default = getattr(sys.modules[type(attention).__module__], "eager_attention_forward", None)
    core = ALL_ATTENTION_FUNCTIONS.get_interface(used, default)
    # Eager attention differs between models, so its name carries the model's module.
    suffix = used if used != "eager" else f"eager_{type(attention).__module__}"
    ALL_ATTENTION_FUNCTIONS.register(PREFIX + suffix, _checkpointed(core))
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation_internal = PREFIX + suffix

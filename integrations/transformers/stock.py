"""Whether a module computes what the layer that takes its place computes.

Tensor parallelism puts Megatron-core's layers where a model has linears and a word embedding. A
subclass with a forward of its own may do more than torch's (scale its output, add an adapter); what
more it does would be lost without a word. Such modules are tried on a small input and compared;
where the weights are on the meta device, only known classes pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from ds_autoplan.integrations.megatron.layers import scaled
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

# Attributes that hold the factor of embeddings that scale their output. The first kind rounds it
# to the weight's type first, the second multiplies by a Python float.
ROUNDED_SCALE, PLAIN_SCALE = "scalar_embed_scale", "embed_scale"
TRIED_TOKENS = 16


def is_transposed(linear: nn.Module) -> bool:
    """Whether the weight is stored [in, out] (GPT-2's Conv1D) instead of [out, in]."""
    return isinstance(linear, Conv1D)


def unlike_linear(module: nn.Module) -> str:
    """Why `module` is no plain linear layer; "" where it is one."""
    kind = type(module)
    if kind.forward in (nn.Linear.forward, Conv1D.forward):
        return ""
    weight, bias = module.weight, getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return f"{kind.__name__} has no matrix as its weight"
    if weight.is_meta:
        return f"{kind.__name__} has a forward of its own, and no weights to try it with"
    matrix = weight.t() if is_transposed(module) else weight
    given = torch.linspace(-1.0, 1.0, 2 * matrix.shape[1], device=weight.device)
    given = given.reshape(2, -1).to(weight.dtype)
    with torch.no_grad():
        try:
            return _difference(kind.__name__, module(given), functional.linear(given, matrix, bias))
        except (RuntimeError, ValueError, TypeError) as error:  # packed weights, other arguments
            return f"{kind.__name__} cannot be tried ({error})"


def embedding_factor(embedding: nn.Module) -> tuple[float | Tensor | None, str]:
    """(What a word embedding multiplies its rows by, why it is none that can be split or "")."""
    kind = type(embedding)
    if kind.forward is nn.Embedding.forward:
        return None, ""
    weight = embedding.weight
    factor: float | Tensor | None = None
    value = getattr(embedding, ROUNDED_SCALE, None)
    if isinstance(value, float | int):
        factor = torch.tensor(float(value))
    elif isinstance(getattr(embedding, PLAIN_SCALE, None), float | int):
        factor = float(getattr(embedding, PLAIN_SCALE))
    if weight.is_meta:
        reason = f"{kind.__name__} has a forward of its own, and no weights to try it with"
        return factor, "" if factor is not None else reason
    with torch.no_grad():
        tokens = torch.arange(min(TRIED_TOKENS, weight.shape[0]), device=weight.device)
        expected = scaled(weight[tokens], factor)
        return factor, _difference(kind.__name__, embedding(tokens), expected)


def _difference(name: str, found: object, expected: Tensor) -> str:
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        return f"{name} does not return what its weight says"
    largest = float(expected.float().abs().max())
    if float((found.float() - expected.float()).abs().max()) > 1e-2 * max(largest, 1e-6):
        return f"{name} computes something else than a product with its weight"
    return ""

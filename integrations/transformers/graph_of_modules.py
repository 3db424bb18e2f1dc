"""The block graph of a model that was not recognised: its weights, as they are, for data parallelism.

Every weight of two dimensions is priced as a linear layer. Nothing of it is sharded or cut into stages;
ZeRO, activation checkpointing (where the model has blocks) and the micro-batch size can still be planned.
"""

from __future__ import annotations

from ds_autoplan.integrations.transformers.structure import stack_of_blocks
from torch import nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.model.graph import BlockClass, BlockGraph, Operator


def graph_of_modules(model: nn.Module, refusal: str) -> BlockGraph:
    """Read the weights off the modules.

    Args:
        model: any torch model.
        refusal: why nothing of it can be sharded.
    """
    name = type(model).__name__
    try:
        stack_name, stack = stack_of_blocks(model)
        blocks = list(stack)
    except UnsupportedError:
        stack_name, blocks = "", []
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    ends = _operators(model, skip=inside)
    if not blocks:
        classes, layers = [_class("whole", name, ends)], [0]
        ends = []
    else:
        classes, layers = [], []
        known: dict[tuple[Operator, ...], int] = {}
        for block in blocks:
            operators = tuple(_operators(block, skip=set()))
            if operators not in known:
                known[operators] = len(classes)
                classes.append(
                    _class(f"{stack_name}-{len(classes)}", type(block).__name__, operators)
                )
            layers.append(known[operators])
    widths = [operator.in_features for item in classes for operator in item.operators]
    embedding = [operator for operator in ends if operator.kind == "embedding"]
    return BlockGraph(
        name=name,
        model_type=str(getattr(getattr(model, "config", None), "model_type", name)),
        hidden_size=max(set(widths), key=widths.count) if widths else 1,
        vocab_size=max((operator.in_features for operator in embedding), default=0),
        max_position=0,
        classes=tuple(classes),
        layers=tuple(layers),
        embedding=tuple(embedding),
        head=tuple(operator for operator in ends if operator.kind != "embedding"),
        tied=False,
        pipeline_refusal=refusal,
        tensor_refusal=refusal,
        num_modules=sum(1 for _ in model.modules()),
    )


def _class(
    fingerprint: str, name: str, operators: list[Operator] | tuple[Operator, ...]
) -> BlockClass:
    return BlockClass(fingerprint, name, None, None, tuple(operators), shardable=frozenset())


def _operators(module: nn.Module, skip: set[int]) -> list[Operator]:
    operators: list[Operator] = []
    seen = set(skip)
    for child_name, child in module.named_modules():
        for name, weight in child.named_parameters(recurse=False):
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            full = f"{child_name}.{name}" if child_name else name
            if isinstance(child, nn.Embedding):
                kind, role = "embedding", "word"
            else:
                kind, role = ("linear", "other") if weight.dim() >= 2 else ("norm", "norm")
            rows = weight.shape[0] if weight.dim() else 1
            operators.append(
                Operator(full, kind, role, weight.numel() // max(1, rows), rows, weight.numel())
                if kind != "embedding"
                else Operator(full, kind, role, rows, weight.shape[-1], weight.numel())
            )
    return operators

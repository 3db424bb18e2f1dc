"""The block graph of a model, read off its modules instead of its config.

For models whose `model_type` the offline tables do not know. Where the structure was recognised,
the graph has its attention and MLP and can be planned like any other. Where it was not, every
weight of two dimensions is priced as a linear layer and nothing is sharded or cut into stages:
ZeRO, activation checkpointing and the micro-batch size can still be planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_autoplan.integrations.transformers.structure import (
    Block,
    ModelStructure,
    in_features,
    out_features,
    stack_of_blocks,
)
from torch import nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.model.graph import Attention, BlockClass, BlockGraph, Mlp, Operator


@dataclass
class _Classes:
    """Block classes by content, in the order they appear."""

    made: list[BlockClass] = field(default_factory=list)

    def index(self, item: BlockClass) -> int:
        if item not in self.made:
            self.made.append(item)
        return self.made.index(item)


def graph_of_structure(structure: ModelStructure) -> BlockGraph:
    """The graph of a recognised model; refusals and what may be sharded are the structure's own."""
    model = structure.model
    classes = _Classes()
    layers = [classes.index(_block_class(block)) for block in structure.blocks]
    inside = {id(p) for block in structure.blocks for p in block.module.parameters()}
    roles = {id(structure.embedding): "word", id(structure.head): "head"}
    ends = {operator.name: operator for operator in _operators(model, roles, inside)}
    before = set(structure.prologue)
    head = [operator for name, operator in ends.items() if name not in before]
    if structure.tied:
        weight = structure.head.weight
        sizes = (in_features(structure.head), out_features(structure.head))
        bias = getattr(structure.head, "bias", None)
        count = 0 if bias is None else bias.numel()
        head = [o for o in head if o.name != structure.head_name]
        head.append(
            Operator(structure.head_name, "linear", "head", *sizes, count, bias is not None)
        )
        assert weight is structure.embedding.weight
    config = model.config.get_text_config()
    return BlockGraph(
        name=str(getattr(model.config, "name_or_path", "") or model.config.model_type),
        model_type=model.config.model_type,
        hidden_size=structure.embedding.weight.shape[1],
        vocab_size=structure.vocab_size,
        max_position=int(getattr(config, "max_position_embeddings", 0) or 0),
        classes=tuple(classes.made),
        layers=tuple(layers),
        embedding=tuple(operator for name, operator in ends.items() if name in before),
        head=tuple(head),
        tied=structure.tied,
        pipeline_refusal=structure.pipeline_refusal,
        tensor_refusal=structure.tensor_refusal,
        num_modules=sum(1 for _ in model.modules()),
    )


def graph_of_modules(model: nn.Module, refusal: str) -> BlockGraph:
    """The graph of any torch model, of which nothing can be sharded.

    Args:
        model: the model.
        refusal: why.
    """
    name = type(model).__name__
    try:
        _, stack = stack_of_blocks(model)
        blocks = list(stack)
    except UnsupportedError:
        blocks = []
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    ends = _operators(model, {}, inside)
    classes = _Classes()
    if blocks:
        layers = [classes.index(_opaque(block, _operators(block, {}, set()))) for block in blocks]
    else:
        layers, ends = [classes.index(_opaque(model, ends))], []
    widths = [operator.in_features for item in classes.made for operator in item.operators]
    embedding = [operator for operator in ends if operator.kind == "embedding"]
    return BlockGraph(
        name=name,
        model_type=str(getattr(getattr(model, "config", None), "model_type", name)),
        hidden_size=max(set(widths), key=widths.count) if widths else 1,
        vocab_size=max((operator.in_features for operator in embedding), default=0),
        max_position=0,
        classes=tuple(classes.made),
        layers=tuple(layers),
        embedding=tuple(embedding),
        head=tuple(operator for operator in ends if operator.kind != "embedding"),
        tied=False,
        pipeline_refusal=refusal,
        tensor_refusal=refusal,
        num_modules=sum(1 for _ in model.modules()),
    )


def _opaque(module: nn.Module, operators: list[Operator]) -> BlockClass:
    name = type(module).__name__
    return BlockClass(name, name, None, None, tuple(operators), shardable=frozenset())


def _block_class(block: Block) -> BlockClass:
    roles: dict[int, str] = {}
    attention = mlp = None
    shardable: set[str] = set()
    if block.attention is not None:
        part = block.attention
        fused = len(part.layout.names) == 1
        for name, role in zip(
            part.layout.names, ("qkv",) if fused else ("q", "k", "v"), strict=True
        ):
            roles[id(part.module.get_submodule(name))] = role
        roles[id(part.module.get_submodule(part.layout.out))] = "attention_out"
        window = getattr(part.module, "sliding_window", None)
        width = part.head_width
        attention = Attention(
            part.heads,
            part.kv_heads,
            width,
            width,
            True,
            window if isinstance(window, int) else None,
        )
        if part.shardable:
            shardable.add("attention")
    if block.mlp is not None:
        part_ = block.mlp
        gated = len(part_.columns) == 2 or part_.columns == ("gate_up_proj",)
        names = part_.columns if len(part_.columns) == 2 else (part_.columns[0],)
        words = ("gate", "up") if len(names) == 2 else ("gate_up" if gated else "up",)
        for name, role in zip(names, words, strict=True):
            roles[id(part_.module.get_submodule(name))] = role
        roles[id(part_.module.get_submodule(part_.row))] = "down"
        mlp = Mlp(part_.intermediate_size, gated)
        shardable.add("mlp")
    operators: list[Operator] = []
    for operator in _operators(block.module, roles, set()):
        size = operator.in_features
        if operator.role == "attention_out":
            operators.append(Operator("attention_core", "attention_core", "other", size, size))
        if operator.role == "down":
            operators.append(Operator("activation", "activation", "other", size, size))
        operators.append(operator)
    name = type(block.module).__name__
    return BlockClass(name, name, attention, mlp, tuple(operators), shardable=frozenset(shardable))


def _operators(module: nn.Module, roles: dict[int, str], skip: set[int]) -> list[Operator]:
    """One operator per module that holds weights; weights in `skip` are left out."""
    operators: list[Operator] = []
    seen = set(skip)
    for name, child in module.named_modules():
        own = {key: p for key, p in child.named_parameters(recurse=False) if id(p) not in seen}
        if not own:
            continue
        seen |= {id(parameter) for parameter in own.values()}
        count = sum(parameter.numel() for parameter in own.values())
        weight = own.get("weight", next(iter(own.values())))
        role = roles.get(id(child), "")
        if isinstance(child, nn.Embedding):
            rows, width = weight.shape
            kind, sizes, role = "embedding", (rows, width), role or "position"
        elif weight.dim() == 2:
            kind, sizes, role = "linear", (in_features(child), out_features(child)), role or "other"
        elif weight.dim() > 2:
            rows = weight.shape[0]
            kind, sizes, role = "linear", (weight.numel() // rows, rows), "other"
        else:
            kind, sizes, role = "norm", (weight.numel(), weight.numel()), "norm"
        operators.append(Operator(name, kind, role, *sizes, count, "bias" in own))
    return operators

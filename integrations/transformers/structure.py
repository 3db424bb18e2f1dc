"""The structure of a Hugging Face causal LM: prologue, blocks, epilogue, head, ties.

What a block needs is not guessed: a forward over two tokens is recorded, in which only the first
block of each kind runs. From the order of calls follow the *prologue* (weights used before the
first block) and the *epilogue* (after the last); from the blocks' arguments, whether anything but
hidden states carries gradients across a stage boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from ds_autoplan.integrations.transformers.declared import (
    contradiction,
    declared_mlp,
    declared_stack,
    declared_styles,
)
from ds_autoplan.integrations.transformers.layouts import (
    ATTENTION_LAYOUTS,
    ATTENTION_NAMES,
    MLP_LAYOUTS,
    MLP_NAMES,
    AttentionLayout,
    packing,
)
from ds_autoplan.integrations.transformers.stock import (
    embedding_factor,
    is_transposed,
    unlike_linear,
)
from torch import Tensor, nn

from ds_autoplan.errors import UnsupportedError


@dataclass(frozen=True)
class AttentionPart:
    """One block's attention: where it is, how it is packed, its sizes over the whole model."""

    name: str
    module: nn.Module
    layout: AttentionLayout
    projections: str
    heads: int
    kv_heads: int
    head_width: int

    @property
    def shardable(self) -> bool:
        """Whether heads can be told apart: in the packing, and in the norms of queries and keys."""
        if self.projections == "mixed":
            return False
        known = {id(self.module.get_submodule(n)) for n in (*self.layout.names, self.layout.out)}
        others = [
            parameter
            for child in self.module.modules()
            if id(child) not in known
            for parameter in child.parameters(recurse=False)
        ]
        return all(parameter.shape == (self.head_width,) for parameter in others)


@dataclass(frozen=True)
class MlpPart:
    """One block's MLP; `name` is "" where its layers stand in the block itself."""

    name: str
    module: nn.Module
    columns: tuple[str, ...]
    row: str
    intermediate_size: int


@dataclass
class Block:
    """One block and what is known of it; `attention` or `mlp` is None where unknown."""

    index: int
    name: str
    module: nn.Module
    attention: AttentionPart | None
    mlp: MlpPart | None
    refusal: str = ""


@dataclass
class ModelStructure:
    """A causal LM taken apart. Names are dotted, from the model.

    `returns_tuple`: blocks return (hidden states, ...). `widths`: last dimension of what the
        prologue's and
    epilogue's modules give. `tensor_refusal` and `pipeline_refusal` say why
    the model cannot be split that way ("" where it can).
    """

    model: nn.Module
    blocks: list[Block]
    blocks_name: str
    embedding_name: str
    head_name: str
    prologue: list[str]
    epilogue: list[str]
    tied: bool
    returns_tuple: bool
    tensor_refusal: str = ""
    pipeline_refusal: str = ""
    tied_names: dict[str, str] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Rows of the word embedding."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def embedding(self) -> nn.Module:
        """The word embedding."""
        return self.model.get_submodule(self.embedding_name)

    @property
    def head(self) -> nn.Module:
        """The output layer that makes logits."""
        return self.model.get_submodule(self.head_name)


def analyse(model: nn.Module) -> ModelStructure:
    """Take a model apart.

    Raises:
        UnsupportedError: the model is not a Hugging Face causal LM with one stack of blocks. The
        message
            names what was looked for; such a model still runs under plans with tp = pp = 1.
    """
    name = type(model).__name__
    remedy = "It can be planned with data parallelism only (tp = pp = 1)."
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise UnsupportedError(f"{name} is not a Hugging Face model.", "", remedy)
    if not name.endswith("ForCausalLM") and not name.endswith("LMHeadModel"):
        raise UnsupportedError(
            f"{name} has no causal language-modelling head.",
            "Tensor and pipeline parallelism take models that end in ForCausalLM.",
            remedy,
        )
    blocks_name, stack = stack_of_blocks(model)
    styles = declared_styles(model, blocks_name)
    names = {id(module): dotted for dotted, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None or id(head) not in names:
        raise UnsupportedError(f"{name} has no word embedding or no output layer.", "", remedy)
    blocks = [
        _block(config.model_type, index, f"{blocks_name}.{index}", module, styles)
        for index, module in enumerate(stack)
    ]
    record = _record_call(model, blocks_name, stack)
    structure = ModelStructure(
        model=model,
        blocks=blocks,
        blocks_name=blocks_name,
        embedding_name=names[id(embedding)],
        head_name=names[id(head)],
        prologue=[names[id(module)] for module in record.before],
        epilogue=[names[id(module)] for module in record.after],
        tied=embedding.weight is head.weight,
        returns_tuple=record.returns_tuple,
        tied_names=tied_names(model),
        widths={names[key]: width for key, width in record.widths.items()},
    )
    reasons = [*_unlike_stock(structure), *(block.refusal for block in blocks)]
    structure.tensor_refusal = next((reason for reason in reasons if reason), "")
    structure.pipeline_refusal = record.refusal or _unexpected_ties(structure)
    return structure


def stack_of_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of blocks and its name: the one the model declares, else the one with most weights.

    Raises:
        UnsupportedError: the model has no such list.
    """
    declared = declared_stack(model)
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and _outside_of_stacks(model, name)
    ]
    if not stacks:
        raise UnsupportedError(
            f"{type(model).__name__} has no list of blocks.",
            "Blocks are recognised as the model's largest torch.nn.ModuleList.",
            "It can be planned with data parallelism only (tp = pp = 1).",
        )
    for name, stack in stacks:
        if name == declared:
            return name, stack
    return max(stacks, key=lambda item: sum(p.numel() for p in item[1].parameters()))


def _outside_of_stacks(model: nn.Module, name: str) -> bool:
    parts = name.split(".")
    parents = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return not any(isinstance(model.get_submodule(parent), nn.ModuleList) for parent in parents)


def _block(
    model_type: str, index: int, name: str, module: nn.Module, styles: dict[str, str]
) -> Block:
    attention, mlp = _attention(model_type, module), _mlp(module, styles)
    refusal = contradiction(styles, *_recognised(attention, mlp))
    if attention is None and mlp is None:
        refusal = (
            f"{name} ({type(module).__name__}, model type {model_type!r}) holds no attention and "
            "no MLP of a known structure"
        )
    known = _known_weights(attention, mlp)
    for child_name, child in module.named_modules():
        own = list(child.parameters(recurse=False))
        if own and id(child) not in known and max(p.dim() for p in own) >= 2 and not refusal:
            refusal = (
                f"{name}.{child_name} ({type(child).__name__}, model type {model_type!r}) is a "
                "weight of unknown structure"
            )
    return Block(index, name, module, attention, mlp, refusal)


def _unlike_stock(structure: ModelStructure) -> Iterator[str]:
    """Why a layer that tensor parallelism would replace does more than what replaces it."""
    _, reason = embedding_factor(structure.embedding)
    if reason:
        yield f"{structure.embedding_name}: {reason}"
    linears = [(structure.head_name, structure.head)]
    for block in structure.blocks:
        for part, names in _parts(block):
            prefix = ".".join(item for item in (block.name, part.name) if item)
            linears += [(f"{prefix}.{name}", part.module.get_submodule(name)) for name in names]
    for name, linear in linears:
        reason = unlike_linear(linear)
        if reason:
            yield f"{name}: {reason}"


def _parts(block: Block) -> Iterator[tuple[AttentionPart | MlpPart, tuple[str, ...]]]:
    """A block's parts, with the linears of each."""
    if block.attention is not None:
        yield block.attention, (*block.attention.layout.names, block.attention.layout.out)
    if block.mlp is not None:
        yield block.mlp, (*block.mlp.columns, block.mlp.row)


def _known_weights(attention: AttentionPart | None, mlp: MlpPart | None) -> set[int]:
    known: set[int] = set()
    if attention is not None:
        for name in (*attention.layout.names, attention.layout.out):
            known.add(id(attention.module.get_submodule(name)))
    if mlp is not None:
        for name in (*mlp.columns, mlp.row):
            known.add(id(mlp.module.get_submodule(name)))
    return known


def _recognised(attention: AttentionPart | None, mlp: MlpPart | None) -> tuple[set[str], set[str]]:
    """Names within the block of what is taken as column-parallel and as row-parallel."""
    columns: set[str] = set()
    rows: set[str] = set()
    if attention is not None:
        columns |= {f"{attention.name}.{item}" for item in attention.layout.names}
        rows.add(f"{attention.name}.{attention.layout.out}")
    if mlp is not None:
        prefix = f"{mlp.name}." if mlp.name else ""
        columns |= {prefix + item for item in mlp.columns}
        rows.add(prefix + mlp.row)
    return columns, rows


def _attention(model_type: str, block: nn.Module) -> AttentionPart | None:
    children = dict(block.named_modules())
    for name in ATTENTION_NAMES:
        module = children.get(name)
        if module is None:
            continue
        for layout in ATTENTION_LAYOUTS:
            matches_type = not layout.model_types or model_type in layout.model_types
            present = all(hasattr(module, item) for item in (*layout.names, layout.out))
            if matches_type and present:
                return _attention_part(name, module, layout)
    return None


def _attention_part(name: str, module: nn.Module, layout: AttentionLayout) -> AttentionPart | None:
    width = getattr(module, layout.head_width, None)
    if not isinstance(width, int):
        return None
    heads, rest = divmod(in_features(module.get_submodule(layout.out)), width)
    first = out_features(module.get_submodule(layout.names[0]))
    projections = packing(layout, module)
    if projections == "separate":
        kv_heads = out_features(module.get_submodule(layout.names[1])) // width
        consistent = first == heads * width
    elif projections in ("per_head", "mixed"):
        kv_heads, consistent = heads, first == 3 * heads * width
    else:
        kv_heads = (first // width - heads) // 2
        consistent = first == (heads + 2 * kv_heads) * width
    if rest or not consistent or kv_heads < 1 or heads % kv_heads:
        return None
    return AttentionPart(name, module, layout, projections, heads, kv_heads, width)


def _mlp(block: nn.Module, styles: dict[str, str]) -> MlpPart | None:
    for name in MLP_NAMES:
        module = block if name == "" else getattr(block, name, None)
        if not isinstance(module, nn.Module):
            continue
        declared = declared_mlp(styles, name)
        for columns, row in ((declared,) if declared else ()) + MLP_LAYOUTS:
            if not all(
                isinstance(getattr(module, item, None), nn.Module) for item in (*columns, row)
            ):
                continue
            size = in_features(module.get_submodule(row))
            produced = sum(out_features(module.get_submodule(item)) for item in columns)
            if produced == size * (2 if len(columns) == 2 or columns == ("gate_up_proj",) else 1):
                return MlpPart(name, module, columns, row, size)
    return None


def in_features(linear: nn.Module) -> int:
    """Size of the contracted dimension of a linear layer."""
    return int(linear.weight.shape[0 if is_transposed(linear) else 1])


def out_features(linear: nn.Module) -> int:
    """Size of the produced dimension of a linear layer."""
    return int(linear.weight.shape[1 if is_transposed(linear) else 0])


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of a parameter's further appearances -> its first name; compared by identity."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            tied[name] = first[id(parameter)]
        else:
            first[id(parameter)] = name
    return tied


def _unexpected_ties(structure: ModelStructure) -> str:
    expected = {f"{structure.head_name}.weight", f"{structure.embedding_name}.weight"}
    for name, other in structure.tied_names.items():
        if not {name, other} <= expected:
            return f"{name} is tied to {other}; only word embedding and head may share a weight"
    return ""


@dataclass
class _Record:
    before: list[nn.Module] = field(default_factory=list)
    after: list[nn.Module] = field(default_factory=list)
    started: bool = False
    returns_tuple: bool = False
    refusal: str = ""
    widths: dict[int, int] = field(default_factory=dict)


@contextmanager
def _quiet_forward(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with the random state and the mode restored afterwards."""
    was_training = model.training
    with torch.random.fork_rng():
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def _record_call(model: nn.Module, blocks_name: str, stack: nn.ModuleList) -> _Record:
    record = _Record()
    handles = []
    inside = {id(module) for block in stack for module in block.modules()}
    for _, module in model.named_modules():
        if id(module) not in inside and any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_hook(_note_call(record)))
    originals: list[nn.Module] = []
    for index, block in enumerate(stack):
        handles.append(
            block.register_forward_pre_hook(
                _note_block(record, f"{blocks_name}.{index}"), with_kwargs=True
            )
        )
        if index > 0:
            block.forward = _pass_through(record)
            originals.append(block)
        else:
            handles.append(block.register_forward_hook(_note_output(record)))
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    try:
        with _quiet_forward(model), torch.enable_grad():
            model(input_ids=tokens, use_cache=False)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} could not be called with input_ids alone: {error}.",
            "How its blocks are called is recorded from such a call.",
            "It can be planned with data parallelism only (tp = pp = 1).",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for block in originals:
            del block.forward
    return record


def _note_call(record: _Record) -> Any:
    def hook(module: nn.Module, _: Any, output: Any) -> None:
        seen = record.after if record.started else record.before
        if module not in seen:
            seen.append(module)
        if isinstance(output, Tensor):
            record.widths[id(module)] = output.shape[-1]

    return hook


def _note_block(record: _Record, name: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.started = True
        others = list(args[1:]) + [v for k, v in kwargs.items() if k != "hidden_states"]
        for value in others:
            items = value if isinstance(value, (tuple, list)) else (value,)
            if any(isinstance(item, Tensor) and item.requires_grad for item in items):
                record.refusal = f"{name} takes a second input that carries a gradient"

    return hook


def _note_output(record: _Record) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        record.returns_tuple = isinstance(output, tuple)

    return hook


def _pass_through(record: _Record) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, None) if record.returns_tuple else hidden

    return forward


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of the submodule called `name`."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)

"""Tensor parallelism in place: weights cut over tp, with Megatron-core's layers around them.

Every parameter keeps its identity (`parameter.data = shard`), so client optimizers, parameter
groups and ties stay valid. For every cut parameter a :class:`Shard` remembers which rows each rank
holds, from which the whole weight is put together again for checkpoints.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ds_autoplan.integrations.megatron import random, regions
from ds_autoplan.integrations.megatron.layers import (
    ColumnParallel,
    RowParallel,
    SelectedColumns,
    VocabParallel,
)
from ds_autoplan.integrations.transformers.layouts import (
    WRITES_IN_PLACE,
    heads_of_rank,
    projection_rows,
)
from ds_autoplan.integrations.transformers.stock import embedding_factor, is_transposed
from ds_autoplan.integrations.transformers.structure import (
    AttentionPart,
    Block,
    MlpPart,
    ModelStructure,
    replace_module,
)
from torch import Tensor, nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.strategy import Strategy


@dataclass(frozen=True)
class Shard:
    """How one parameter lies over tp.

    Attributes:
        dim: the dimension that is cut, in the Hugging Face orientation.
        rows: for each tp rank, the indices along `dim` it holds, in its order; disjoint, complete.
        local_size: size along `dim` on every rank, padding included.
        transposed: the rank holds the transpose of the Hugging Face weight.
    """

    dim: int
    rows: tuple[Tensor, ...]
    local_size: int
    transposed: bool = False

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """This rank's shard of a whole weight, zero-padded to `local_size`."""
        index = self.rows[rank].to(whole.device)
        shard = whole.index_select(self.dim, index)
        missing = self.local_size - shard.shape[self.dim]
        if missing:
            shape = list(shard.shape)
            shape[self.dim] = missing
            shard = torch.cat([shard, shard.new_zeros(shape)], dim=self.dim)
        return (shard.t() if self.transposed else shard).contiguous()

    def join(self, shards: list[Tensor]) -> Tensor:
        """The whole weight, in the Hugging Face orientation, from the shards of all ranks."""
        pieces = [piece.t() if self.transposed else piece for piece in shards]
        shape = list(pieces[0].shape)
        shape[self.dim] = sum(index.numel() for index in self.rows)
        whole = pieces[0].new_empty(shape)
        for index, piece in zip(self.rows, pieces, strict=True):
            kept = piece.narrow(self.dim, 0, index.numel())
            whole.index_copy_(self.dim, index.to(whole.device), kept)
        return whole


class Sharder:
    """Cuts one model over tp: :meth:`vocabulary` once, then :meth:`block` for each owned block."""

    def __init__(self, structure: ModelStructure, tp: int, rank: int) -> None:
        """Take the structure of the model, the tp degree and this rank's place in it."""
        self.structure, self.tp, self.rank = structure, tp, rank
        self.shards: dict[str, Shard] = {}
        self.draws = random.draws_in_training(structure.model)
        self.writable = structure.model.config.model_type in WRITES_IN_PLACE

    # Vocabulary

    def vocabulary(self, has_embedding: bool, has_head: bool) -> None:
        """Cut the word embedding and the head by rows of the vocabulary, padded to a multiple.

        Args:
            has_embedding: the embedding lives on this rank's stage.
            has_head: the head lives on this rank's stage.
        """
        structure = self.structure
        if has_embedding:
            embedding = structure.embedding
            factor, _ = embedding_factor(embedding)
            self._cut_vocabulary(f"{structure.embedding_name}.weight", embedding.weight)
            module = VocabParallel(embedding.weight, embedding.padding_idx, factor)
            replace_module(structure.model, structure.embedding_name, module)
        if has_head:
            head = structure.head
            if not (structure.tied and has_embedding):
                self._cut_vocabulary(f"{structure.head_name}.weight", head.weight)
            bias = getattr(head, "bias", None)
            if bias is not None:
                self._cut_vocabulary(f"{structure.head_name}.bias", bias)
            entry = partial(regions.enter_sharded, sequence_parallel=False, token_dim=0)
            replace_module(
                structure.model, structure.head_name, ColumnParallel(head.weight, bias, entry)
            )

    def _local_vocabulary(self) -> int:
        return -(-self.structure.vocab_size // self.tp)

    def _cut_vocabulary(self, name: str, parameter: nn.Parameter) -> None:
        local = self._local_vocabulary()
        starts = range(0, local * self.tp, local)
        size = self.structure.vocab_size
        rows = tuple(torch.arange(min(s, size), min(s + local, size)) for s in starts)
        self._cut(name, parameter, Shard(0, rows, local))

    # Blocks

    def block(self, block: Block, strategy: Strategy) -> None:
        """Apply one layer's strategy: cut its weights, open and close its regions."""
        parallel = strategy.sequence_parallel
        inside: set[int] = set()
        if parallel and self.draws:
            random.split_before(block.module)
            random.rejoin_after(block.module)
        if block.attention is not None:
            part, prefix = block.attention, f"{block.name}.{block.attention.name}"
            if strategy.attention == "heads":
                inside |= self._attention(part, prefix, parallel)
            elif parallel:
                regions.convert_input(part.module, regions.join_sequence)
                out = part.module.get_submodule(part.layout.out)
                regions.convert_output(out, regions.split_sequence)
                if self.draws:
                    random.rejoin_before(part.module)
                    random.split_after(out)
                inside |= {id(p) for p in part.module.parameters()}
        if block.mlp is not None and strategy.mlp == "shard":
            prefix = ".".join(item for item in (block.name, block.mlp.name) if item)
            inside |= self._mlp(block.mlp, prefix, parallel)
        if parallel:
            for parameter in block.module.parameters():
                if id(parameter) not in inside:
                    regions.sum_gradient_over_tp(parameter)

    def _attention(self, part: AttentionPart, prefix: str, parallel: bool) -> set[int]:
        """Shard attention by heads; returns the ids of the parameters whose gradient is settled."""
        if not part.shardable:
            raise UnsupportedError(
                f"{prefix} cannot be split by heads ({part.projections} projections, or norms "
                "over more than one head).",
                "",
                'Plan this layer with attention "replicate".',
            )
        if part.heads % self.tp:
            raise UnsupportedError(
                f"{prefix} has {part.heads} heads, the plan has tp {self.tp}.",
                "Heads are split evenly over tp.",
                'Plan this layer with attention "replicate", or another tp.',
            )
        every = [heads_of_rank(part.heads, part.kv_heads, self.tp, rank) for rank in range(self.tp)]
        local, local_kv = every[self.rank]
        rows_of = [
            projection_rows(
                part.projections, part.heads, part.kv_heads, part.head_width, heads, kv_heads
            )
            for heads, kv_heads in every
        ]
        module, layout = part.module, part.layout
        settled: set[int] = set()
        for index, name in enumerate(layout.names):
            rows = tuple(item[index] for item in rows_of)
            settled |= self._columns(module, f"{prefix}.{name}", name, rows)
        width = part.head_width
        columns = tuple(
            torch.arange(heads[0] * width, (heads[-1] + 1) * width) for heads, _ in every
        )
        settled |= self._row(module, f"{prefix}.{layout.out}", layout.out, columns, parallel, 1)
        for parameter in module.parameters():
            if id(parameter) not in settled:
                regions.sum_gradient_over_tp(parameter)
                settled.add(id(parameter))
        _localise(part, len(local), len(local_kv))
        if self.draws and not parallel:
            random.split_before(module)
            random.rejoin_after(module.get_submodule(layout.out))
        regions.convert_input(
            module, partial(regions.enter_sharded, sequence_parallel=parallel, token_dim=1)
        )
        module.register_forward_pre_hook(
            partial(_select_heads, heads=part.heads, first=local[0], last=local[-1] + 1),
            with_kwargs=True,
        )
        return settled

    def _mlp(self, part: MlpPart, prefix: str, parallel: bool) -> set[int]:
        size, tp = part.intermediate_size, self.tp
        if size % tp:
            raise UnsupportedError(
                f"{prefix} has intermediate size {size}, the plan has tp {tp}.",
                "The MLP is split evenly over tp.",
                'Plan this layer with mlp "replicate", or another tp.',
            )
        share = size // tp
        settled: set[int] = set()
        enter = partial(regions.enter_sharded, sequence_parallel=parallel, token_dim=0)
        fused = part.columns == ("gate_up_proj",)
        for name in part.columns:
            rows = []
            for rank in range(tp):
                index = torch.arange(rank * share, (rank + 1) * share)
                rows.append(torch.cat([index, index + size]) if fused else index)
            entry = enter if part.name == "" else None
            settled |= self._columns(part.module, f"{prefix}.{name}", name, tuple(rows), entry)
        columns = tuple(torch.arange(rank * share, (rank + 1) * share) for rank in range(tp))
        settled |= self._row(part.module, f"{prefix}.{part.row}", part.row, columns, parallel, 0)
        if part.name:
            regions.convert_input(part.module, enter)
        if self.draws and not parallel:
            first = part.module if part.name else part.module.get_submodule(part.columns[0])
            random.split_before(first)
            random.rejoin_after(part.module.get_submodule(part.row))
        return settled

    def _columns(
        self,
        parent: nn.Module,
        full_name: str,
        name: str,
        rows: tuple[Tensor, ...],
        entry: Any = None,
    ) -> set[int]:
        linear = parent.get_submodule(name)
        weight, bias = linear.weight, getattr(linear, "bias", None)
        disjoint = sum(item.numel() for item in rows) == torch.cat(rows).unique().numel()
        if not disjoint:
            if is_transposed(linear):
                raise UnsupportedError(f"{full_name} shares kv heads and is stored transposed.")
            selected = SelectedColumns(weight, bias, rows[self.rank])
            setattr(parent, name, selected.to(weight.device))
            for parameter in (weight, bias):
                if parameter is not None:
                    regions.sum_gradient_over_tp(parameter)
        else:
            transposed = is_transposed(linear)
            local = rows[0].numel()
            self._cut(
                f"{full_name}.weight", weight, Shard(int(transposed), rows, local, transposed)
            )
            if bias is not None:
                self._cut(f"{full_name}.bias", bias, Shard(0, rows, local))
            setattr(parent, name, ColumnParallel(weight, bias, entry))
        return {id(weight)} | ({id(bias)} if bias is not None else set())

    def _row(
        self,
        parent: nn.Module,
        full_name: str,
        name: str,
        columns: tuple[Tensor, ...],
        parallel: bool,
        token_dim: int,
    ) -> set[int]:
        linear = parent.get_submodule(name)
        weight, bias = linear.weight, getattr(linear, "bias", None)
        transposed = is_transposed(linear)
        shard = Shard(0 if transposed else 1, columns, columns[0].numel(), transposed)
        self._cut(f"{full_name}.weight", weight, shard)
        setattr(parent, name, RowParallel(weight, bias, parallel, token_dim, self.writable))
        if bias is not None and parallel:
            regions.sum_gradient_over_tp(bias)
        return {id(weight)} | ({id(bias)} if bias is not None else set())

    def _cut(self, name: str, parameter: nn.Parameter, shard: Shard) -> None:
        parameter.data = shard.cut(parameter.data, self.rank)
        parameter.grad = None
        # DeepSpeed counts a parameter with these marks once per tp rank in norms, others once.
        parameter.tensor_model_parallel = True
        parameter.model_parallel = True
        parameter.partition_dim = 0
        parameter.partition_stride = 1
        self.shards[name] = shard


def _localise(part: AttentionPart, heads: int, kv_heads: int) -> None:
    """Make an attention module count its local heads."""
    module, layout = part.module, part.layout
    values = {name: heads for name in layout.counts_heads}
    values |= {name: kv_heads for name in layout.counts_kv_heads}
    values |= {name: heads * part.head_width for name in layout.widths}
    values |= {name: kv_heads * part.head_width for name in layout.kv_widths}
    values["num_key_value_groups"] = heads // kv_heads
    for name, value in values.items():
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, value)
    if layout.reads_config:
        module.config = copy.copy(module.config)
        module.config.num_attention_heads = heads
        module.config.num_key_value_heads = kv_heads


def _select_heads(
    _: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    heads: int,
    first: int,
    last: int,
) -> tuple[Any, Any]:
    """Cut what is given per head (ALiBi, masks with a head dimension) to this rank's heads."""
    changed = dict(kwargs)
    for name in ("alibi", "position_bias"):
        bias = kwargs.get(name)
        if not isinstance(bias, Tensor):
            continue
        if bias.dim() == 4:
            changed[name] = bias[:, first:last]
        else:  # [batch * heads, ...], or [heads, ...]
            by_head = bias.reshape(-1, heads, *bias.shape[1:])[:, first:last]
            changed[name] = by_head.reshape(-1, *bias.shape[1:])
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == heads > 1:
        changed["attention_mask"] = mask[:, first:last]
    return args, changed

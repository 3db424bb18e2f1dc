"""The batch exchange: the ranks of one replica put their batches together.

To the script every rank is a data-parallel rank with its own batch. The g = tp * pp ranks of a
replica gather those batches, run all of them through the replica, and each takes back what belongs
to its own samples. Sequences of different length are padded at the end, which changes nothing for a
causal model: labels are padded with -100 and attention masks with 0.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_autoplan.errors import BadInputError

IGNORE_INDEX = -100
# Longest list of tensors, and of dimensions of one of them, that a batch may hold.
MAX_TENSORS, MAX_DIMS = 24, 5
DTYPES = (
    torch.int64,
    torch.int32,
    torch.bool,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int16,
)
PADDING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}


@dataclass(frozen=True)
class ReplicaBatch:
    """The batches of one replica's ranks, in the order of the ranks.

    Attributes:
        tensors: arguments that hold samples along dim 0: [sum of samples, ...].
        scalars: 0-d tensors, one row per rank: [g].
        others: arguments that are no tensors; equal on all ranks.
        samples: number of samples of each rank.
        lengths: sequence length of each rank's batch (0 where nothing has a sequence dimension).
        rank: this rank's place in the replica.
    """

    tensors: dict[str, Tensor]
    scalars: dict[str, Tensor]
    others: dict[str, Any]
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    rank: int

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return sum(self.samples)

    @property
    def own(self) -> slice:
        """Rows of this rank's samples."""
        start = sum(self.samples[: self.rank])
        return slice(start, start + self.samples[self.rank])

    def within(self, start: int, end: int) -> tuple[int, ...]:
        """How many of the samples `start` to `end` - 1 each rank brought."""
        counts, first = [], 0
        for count in self.samples:
            counts.append(max(0, min(end, first + count) - max(start, first)))
            first += count
        return tuple(counts)

    def sources(self, device: torch.device) -> Tensor:
        """For each sample the rank (within the replica) it came from: [samples]."""
        counts = torch.tensor(self.samples, device=device)
        return torch.repeat_interleave(torch.arange(len(self.samples), device=device), counts)


def exchange(
    inputs: dict[str, Any], group: dist.ProcessGroup, device: torch.device, multiple: int
) -> ReplicaBatch:
    """Gather the batches of all ranks of `group`.

    Args:
        inputs: this rank's arguments by name.
        group: the replica's ranks.
        device: where the tensors go.
        multiple: the sequence length is padded to a multiple of this (tp under sequence
            parallelism).

    Raises:
        BadInputError: on every rank, if the ranks' arguments differ in more than samples and
        length.
    """
    names = sorted(name for name, value in inputs.items() if isinstance(value, Tensor))
    inputs = {**inputs, **_one_row_per_sample(inputs, names)}
    others = {name: value for name, value in inputs.items() if name not in names}
    header = _header(inputs, names, others)
    headers = [torch.empty_like(header, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(headers, header.to(device), group=group)
    table = torch.stack(headers).cpu()
    _check_headers(table, names, others)
    shapes = [_shapes(row, len(names)) for row in table]
    samples, lengths = _sizes(names, shapes, dist.get_rank())
    target = max(lengths, default=0)
    target += -target % multiple
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Tensor] = {}
    for index, name in enumerate(names):
        value = inputs[name].to(device)
        pieces = _gather(value, [shape[index] for shape in shapes], group)
        if value.dim() == 0:
            scalars[name] = torch.stack(pieces)
            continue
        padded = [
            _pad(piece, name, length, target) for piece, length in zip(pieces, lengths, strict=True)
        ]
        tensors[name] = torch.cat(padded)
    return ReplicaBatch(tensors, scalars, others, samples, lengths, dist.get_rank(group))


def _one_row_per_sample(inputs: dict[str, Any], names: list[str]) -> dict[str, Tensor]:
    """Tensors given once for all samples (position ids [1, sequence]), repeated for each."""
    if "input_ids" not in names:
        return {}
    samples = inputs["input_ids"].shape[0]
    return {
        name: inputs[name].expand(samples, *inputs[name].shape[1:])
        for name in names
        if inputs[name].dim() > 1 and inputs[name].shape[0] == 1 != samples
    }


def _header(inputs: dict[str, Any], names: list[str], others: dict[str, Any]) -> Tensor:
    """The arguments in fixed size: a checksum of names and plain values, dtypes, shapes."""
    if len(names) > MAX_TENSORS:
        raise BadInputError(
            f"The model was called with {len(names)} tensors.",
            f"At most {MAX_TENSORS} can be exchanged.",
            'Set "tensor_parallel": false and "pipeline": false in "autoplan".',
        )
    text = repr((names, sorted((key, repr(value)) for key, value in others.items())))
    header = torch.zeros(1 + MAX_TENSORS * (MAX_DIMS + 2), dtype=torch.int64)
    header[0] = zlib.crc32(text.encode())
    for index, name in enumerate(names):
        value = inputs[name]
        if value.dtype not in DTYPES or value.dim() > MAX_DIMS:
            raise BadInputError(
                f"The argument {name!r} has dtype {value.dtype} and {value.dim()} dimensions.",
                f"Exchanged tensors have at most {MAX_DIMS} dimensions and a dtype of {DTYPES}.",
                'Set "tensor_parallel": false and "pipeline": false in "autoplan".',
            )
        start = 1 + index * (MAX_DIMS + 2)
        header[start] = DTYPES.index(value.dtype)
        header[start + 1] = value.dim()
        header[start + 2 : start + 2 + value.dim()] = torch.tensor(value.shape)
    return header


def _check_headers(table: Tensor, names: list[str], others: dict[str, Any]) -> None:
    for rank, row in enumerate(table):
        same_kind = all(
            torch.equal(row[1 + i * (MAX_DIMS + 2) :][:2], table[0][1 + i * (MAX_DIMS + 2) :][:2])
            for i in range(len(names))
        )
        if row[0] != table[0][0] or not same_kind:
            raise BadInputError(
                f"Ranks 0 and {rank} of a replica called the model with different arguments "
                f"(here: tensors {names}, others {sorted(others)}).",
                "All ranks must pass the same argument names, dtypes and plain values.",
                "Check the data loader and branches that depend on the rank.",
            )


def _shapes(row: Tensor, count: int) -> list[tuple[int, ...]]:
    shapes = []
    for index in range(count):
        start = 1 + index * (MAX_DIMS + 2)
        dims = int(row[start + 1])
        shapes.append(tuple(row[start + 2 : start + 2 + dims].tolist()))
    return shapes


def _sizes(
    names: list[str], shapes: list[list[tuple[int, ...]]], rank: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Samples and sequence length of each rank; `input_ids`, or else the first tensor, decides."""
    with_dims = [index for index, shape in enumerate(shapes[0]) if shape]
    if not with_dims:
        raise BadInputError(
            f"The model was called with the tensors {names}, none of which has a batch dimension.",
            "A batch holds samples along dimension 0.",
            "Call the engine with input_ids and labels of shape [batch, sequence].",
        )
    lead = names.index("input_ids") if "input_ids" in names else with_dims[0]
    samples = tuple(per_rank[lead][0] for per_rank in shapes)
    lengths = tuple(per_rank[lead][1] if len(per_rank[lead]) > 1 else 0 for per_rank in shapes)
    for source, per_rank in enumerate(shapes):
        for index in with_dims:
            if per_rank[index][0] != samples[source]:
                raise BadInputError(
                    f"The argument {names[index]!r} has shape {list(per_rank[index])} where "
                    f"{names[lead]!r} has {samples[source]} samples.",
                    "Every tensor of a batch holds one row per sample.",
                    f"Expand it to {samples[source]} rows (rank {rank}).",
                )
    return samples, lengths


def _gather(value: Tensor, shapes: list[tuple[int, ...]], group: dist.ProcessGroup) -> list[Tensor]:
    """All ranks' tensors, each with its own shape."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = value.reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    buffer = flat.new_zeros(max(sizes))
    buffer[: flat.numel()] = flat
    pieces = [torch.empty_like(buffer) for _ in shapes]
    dist.all_gather(pieces, buffer, group=group)
    return [
        piece[:size].reshape(shape).to(value.dtype)
        for piece, size, shape in zip(pieces, sizes, shapes, strict=True)
    ]


def _pad(piece: Tensor, name: str, length: int, target: int) -> Tensor:
    """Pad every dimension after the first that has the sequence's length."""
    if length == target or length == 0:
        return piece
    if piece.is_floating_point() and piece.dim() > 2 and length in piece.shape[1:]:
        raise BadInputError(
            f"The argument {name!r} of shape {list(piece.shape)} depends on the sequence length, "
            f"which differs between ranks ({length} and {target}).",
            "Only [batch, sequence] tensors of integers can be padded.",
            "Pad all batches to one length in the collator.",
        )
    for dim in range(1, piece.dim()):
        if piece.shape[dim] == length:
            shape = list(piece.shape)
            shape[dim] = target - length
            filling = piece.new_full(shape, PADDING.get(name, 0))
            piece = torch.cat([piece, filling], dim=dim)
    return piece

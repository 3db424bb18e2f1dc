"""The whole model's weights, from the pieces that the ranks of a replica hold.

In data parallelism a script may save on one rank alone (`if rank == 0:
model.save_pretrained(...)`), so that must work here. Every rank of a replica runs a thread that
serves its own pieces on request, over a gloo group of its own. A rank that is behind answers when
it has done as many steps as the asking one; one that is ahead cannot have changed its weights,
because its next call waits in the batch exchange for the rank that is busy saving. At the end of
the script a rank stays until the ranks that may still ask have said that they are done.

ZeRO stage 3 partitions the pieces once more; there, as with DeepSpeed itself, all ranks must call
together.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ds_autoplan.integrations.transformers.shard import Shard
from torch import Tensor, nn

from ds_autoplan.errors import UnsupportedError

GET, DONE = 1, 2
REQUEST_TAG, REPLY_TAG = 71, 72


@dataclass(frozen=True)
class Piece:
    """What one rank holds under one name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard | None


class HeldElsewhere(OrderedDict):  # type: ignore[type-arg]
    """A state dict that this rank was not given; reading it says who has it."""

    def _refuse(self, *_: Any) -> Any:
        raise UnsupportedError(
            "The whole state dict was read on a rank that does not hold it.",
            "Under a plan the first rank of each node gets the whole weights.",
            "Read and save it where LOCAL_RANK is 0.",
        )

    __getitem__ = __iter__ = items = values = keys = _refuse  # type: ignore[assignment]


class WeightService:
    """Serves this rank's pieces and collects the whole; one per replica rank."""

    def __init__(
        self,
        model: nn.Module,
        names: list[str],
        tied: dict[str, str],
        shards: dict[str, Shard],
        group: dist.ProcessGroup,
        tp: int,
    ) -> None:
        """Start serving; a collective of all ranks.

        Args:
            model: the model as this rank holds it.
            names: names of the whole model's state dict, in order.
            tied: names that alias another name.
            shards: how this rank's parameters are cut.
            group: the replica's ranks, tp fastest.
            tp: the tp degree.
        """
        self.model, self.names, self.tied, self.tp = model, names, tied, tp
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank()
        self.steps = 0
        self.stepped = threading.Condition()
        self.own = self._own_pieces(shards)
        held: list[Any] = [None] * len(self.ranks)
        local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        dist.all_gather_object(held, (self.own, local_rank), group=group)
        self.held: dict[int, dict[str, Piece]] = {
            rank: pieces for rank, (pieces, _) in zip(self.ranks, held, strict=True)
        }
        self.service_group = self._make_group(group)
        self.keeps = local_rank == 0
        self.keepers = [
            rank for rank, (_, local) in zip(self.ranks, held, strict=True) if local == 0
        ]
        self.finished = {rank: threading.Event() for rank in self.keepers if rank != self.rank}
        self.closed = False
        self.thread: threading.Thread | None = None
        if self.finished:
            self.thread = threading.Thread(
                target=self._serve, name="ds_autoplan_weights", daemon=True
            )
            self.thread.start()
        if len(self.ranks) > 1:
            atexit.register(self.close)

    def _own_pieces(self, shards: dict[str, Shard]) -> dict[str, Piece]:
        return {
            name: Piece(tuple(tensor.shape), tensor.dtype, shards.get(name))
            for name, tensor in self._local().items()
        }

    def _local(self) -> dict[str, Tensor]:
        state = type(self.model).state_dict(self.model)
        wanted = set(self.names)
        return {name: t for name, t in state.items() if name in wanted and isinstance(t, Tensor)}

    def _make_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        mine = None
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.ranks)
        for ranks in sorted({tuple(item) for item in every}):
            made = dist.new_group(list(ranks), backend="gloo", timeout=timedelta(days=365))
            if self.rank in ranks:
                mine = made
        return mine

    def note_step(self) -> None:
        """Count an update of the weights; every rank makes the same ones."""
        with self.stepped:
            self.steps += 1
            self.stepped.notify_all()

    # Serving

    def _serve(self) -> None:
        while not all(event.is_set() for event in self.finished.values()):
            request = torch.zeros(4, dtype=torch.int64)
            try:
                dist.recv(request, group=self.service_group, tag=REQUEST_TAG)
            except (RuntimeError, ValueError):
                return  # the group was torn down: the job ends
            kind, source, index, steps = request.tolist()
            if kind == DONE:
                self.finished[source].set()
                continue
            with self.stepped:  # the asking rank may be ahead: answer when as many steps are done
                self.stepped.wait_for(lambda: self.steps >= steps)  # noqa: B023
            tensor = self._local()[self.names[index]].detach()
            payload = tensor.contiguous().cpu().flatten().view(torch.uint8).clone()
            dist.send(payload, dst=source, group=self.service_group, tag=REPLY_TAG)

    def _ask(self, rank: int, index: int, piece: Piece) -> Tensor:
        name = self.names[index]
        if rank == self.rank:
            return self._local()[name].detach().cpu()
        request = torch.tensor([GET, self.rank, index, self.steps], dtype=torch.int64)
        dist.send(request, dst=rank, group=self.service_group, tag=REQUEST_TAG)
        count = torch.Size(piece.shape).numel() * torch.empty((), dtype=piece.dtype).element_size()
        payload = torch.empty(count, dtype=torch.uint8)
        dist.recv(payload, src=rank, group=self.service_group, tag=REPLY_TAG)
        return payload.view(piece.dtype).reshape(piece.shape)

    def close(self) -> None:
        """Say that this rank asks no more, and stay until all that may ask have said so.

        All ranks of the replica call it: when the engine is destroyed, or at the end of the script.
        """
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.close)
        if self.rank in self.keepers:
            for rank in self.ranks:
                if rank != self.rank:
                    request = torch.tensor([DONE, self.rank, 0, 0], dtype=torch.int64)
                    dist.send(request, dst=rank, group=self.service_group, tag=REQUEST_TAG)
        for event in self.finished.values():
            event.wait()
        if self.thread is not None:
            self.thread.join()

    # The whole

    def whole(self) -> OrderedDict[str, Tensor]:
        """The whole model's state dict on the CPU, in the Hugging Face layout.

        The first rank of each node gets it, the others a :class:`HeldElsewhere`.
        """
        if self.closed and len(self.ranks) > 1:
            raise UnsupportedError(
                "The whole weights were asked for after the engine was destroyed.",
                "Its ranks put them together while the engine lives.",
                "Save the model before engine.destroy().",
            )
        if not self.keeps:
            return HeldElsewhere()
        state: OrderedDict[str, Tensor] = OrderedDict()
        for index, name in enumerate(self.names):
            if name in self.tied and self.tied[name] in state:
                state[name] = state[self.tied[name]]
            else:
                state[name] = self._collect(index)
        return state

    def _collect(self, index: int) -> Tensor:
        name = self.names[index]
        holders = [rank for rank in self.ranks if name in self.held[rank]]
        if not holders:
            raise AssertionError(f"no rank holds {name}")
        first = holders[0]
        shard = self.held[first][name].shard
        if shard is None:
            source = self.rank if self.rank in holders else first
            return self._ask(source, index, self.held[source][name]).clone()
        pieces = [self._ask(rank, index, self.held[rank][name]) for rank in holders[: self.tp]]
        return shard.join(pieces)


def whole_under_zero_3(
    service: WeightService, parameters: dict[str, nn.Parameter], tp_group: dist.ProcessGroup
) -> OrderedDict[str, Tensor]:
    """As :meth:`WeightService.whole`, for ZeRO stage 3; all ranks call together."""
    import deepspeed

    keep = service.keeps
    state: OrderedDict[str, Tensor] = OrderedDict()
    for name in service.names:
        if name in service.tied:
            if keep:
                state[name] = state[service.tied[name]]
            continue  # on every rank: what follows is a collective
        parameter = parameters.get(name)
        if parameter is None:
            state[name] = service._local()[name].detach().cpu().clone()
            continue
        with deepspeed.zero.GatheredParameters([parameter]):
            local = parameter.data.contiguous()
            shard = service.own[name].shard
            if shard is not None:
                pieces = [torch.empty_like(local) for _ in range(service.tp)]
                dist.all_gather(pieces, local, group=tp_group)
                local = shard.join(pieces)
            if keep:
                state[name] = local.cpu().clone()
    return state if keep else HeldElsewhere()


def answer_with_whole_weights(
    model: nn.Module, collect: Callable[[], OrderedDict[str, Tensor]]
) -> None:
    """Make `model.state_dict()` and `model.save_pretrained()` give the whole model.

    Calls that DeepSpeed nests (with a destination) keep giving this rank's own pieces.
    """
    local = model.state_dict
    save = model.save_pretrained

    def state_dict(*args: Any, destination: Any = None, **kwargs: Any) -> Any:
        if args or destination is not None:
            return local(*args, destination=destination, **kwargs)
        return collect()

    def save_pretrained(
        save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> Any:
        whole = collect() if state_dict is None else state_dict
        if isinstance(whole, HeldElsewhere):
            return None
        return save(save_directory, is_main_process=is_main_process, state_dict=whole, **kwargs)

    model.state_dict = state_dict
    model.save_pretrained = save_pretrained

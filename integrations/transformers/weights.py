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
import functools
import logging
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ds_autoplan.integrations.transformers.shard import Shard
from torch import Tensor, nn

from ds_autoplan.errors import UnsupportedError

log = logging.getLogger("ds_autoplan")

GET, DONE = 1, 2
REQUEST_TAG, REPLY_TAG = 71, 72
# How long a rank that has ended waits for the others before it says so.
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Piece:
    """What one rank holds under one name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Shard | None


class HeldElsewhere(Mapping[str, Tensor]):
    """The whole state dict on a rank that was not given it: each weight is fetched when it is read.

    It is no dict, so that what copies state dicts on every rank before one of them saves
    (accelerate does) does not copy the model to every rank.
    """

    def __init__(self, names: list[str], fetch: Callable[[str], Tensor] | None) -> None:
        """Take the names of the state dict, in order, and what gets one weight.

        Args:
            names: the keys.
            fetch: collects the weight of one name; None where all ranks must collect together.
        """
        self.names, self.fetch = names, fetch

    def __getitem__(self, name: str) -> Tensor:
        """The whole weight called `name`."""
        if name not in self.names:
            raise KeyError(name)
        if self.fetch is None:
            raise UnsupportedError(
                f"The whole weight {name!r} was read on a rank that does not hold it.",
                "Under ZeRO stage 3 the first rank of each node gets the whole weights.",
                "Read and save the state dict where LOCAL_RANK is 0.",
            )
        return self.fetch(name)

    def __iter__(self) -> Iterator[str]:
        """The names, in order."""
        return iter(self.names)

    def __len__(self) -> int:
        """How many names there are."""
        return len(self.names)

    def __reduce__(self) -> Any:
        """Saved (torch.save) it is the dict it stands for."""
        return OrderedDict, (list(self.items()),)


_services: weakref.WeakSet[WeightService] = weakref.WeakSet()


def _close_before_groups_end() -> None:
    """Make `torch.distributed.destroy_process_group` wait for ranks that still save."""
    original = dist.destroy_process_group
    if hasattr(original, "ds_autoplan_original"):
        return

    @functools.wraps(original)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        if group is None or group == dist.group.WORLD:
            for service in list(_services):
                service.close()
        original(group)

    destroy_process_group.ds_autoplan_original = original  # type: ignore[attr-defined]
    dist.destroy_process_group = destroy_process_group


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
        dist.all_gather_object(held, self.own, group=group)
        self.held: dict[int, dict[str, Piece]] = dict(zip(self.ranks, held, strict=True))
        self.service_group = self._make_group(group)
        self.keeps = int(os.environ.get("LOCAL_RANK", self.rank)) == 0
        self.finished = {rank: threading.Event() for rank in self.ranks if rank != self.rank}
        self.closed = False
        self.thread: threading.Thread | None = None
        if self.finished:
            self.thread = threading.Thread(
                target=self._serve, name="ds_autoplan_weights", daemon=True
            )
            self.thread.start()
        if len(self.ranks) > 1:
            atexit.register(self.close)
            _services.add(self)
            _close_before_groups_end()

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
        try:
            while not all(event.is_set() for event in self.finished.values()):
                self._serve_one()
        except (RuntimeError, ValueError):
            # The group was torn down, or a rank is gone: the job ends, nobody asks any more.
            for event in self.finished.values():
                event.set()

    def _serve_one(self) -> None:
        request = torch.zeros(4, dtype=torch.int64)
        dist.recv(request, group=self.service_group, tag=REQUEST_TAG)
        kind, source, index, steps = request.tolist()
        if kind == DONE:
            self.finished[source].set()
            return
        with self.stepped:  # the asking rank may be ahead: answer when as many steps are done
            self.stepped.wait_for(lambda: self.steps >= steps)
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

        All ranks of the replica call it: when the engine is destroyed, or at the end of the
        script or where it ends torch.distributed. A rank that ends with an error does not wait:
        the others may wait for it.
        """
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self.close)
        try:
            for rank in self.finished:
                request = torch.tensor([DONE, self.rank, 0, 0], dtype=torch.int64)
                dist.send(request, dst=rank, group=self.service_group, tag=REQUEST_TAG)
        except (RuntimeError, ValueError):
            return  # the group was torn down, or a rank is gone
        if sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None:
            return
        for rank, event in self.finished.items():
            if not event.wait(PATIENCE_S):
                log.warning(
                    "ds_autoplan: rank %d has ended and stays until rank %d does, which may still "
                    "ask for its weights.",
                    self.rank,
                    rank,
                )
                event.wait()
        if self.thread is not None:
            self.thread.join()

    # The whole

    def whole(self) -> Mapping[str, Tensor]:
        """The whole model's state dict on the CPU, in the Hugging Face layout.

        The first rank of each node gets it, the others a :class:`HeldElsewhere`.
        """
        self._require_open()
        if not self.keeps:
            return HeldElsewhere(self.names, self._fetch)
        state: OrderedDict[str, Tensor] = OrderedDict()
        for index, name in enumerate(self.names):
            if name in self.tied and self.tied[name] in state:
                state[name] = state[self.tied[name]]
            else:
                state[name] = self._collect(index)
        return state

    def _fetch(self, name: str) -> Tensor:
        self._require_open()
        return self._collect(self.names.index(name))

    def _require_open(self) -> None:
        if self.closed and len(self.ranks) > 1:
            raise UnsupportedError(
                "The whole weights were asked for after the engine was destroyed.",
                "Its ranks put them together while the engine lives.",
                "Save the model before engine.destroy().",
            )

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
) -> Mapping[str, Tensor]:
    """As :meth:`WeightService.whole`, for weights under ZeRO stage 3; all ranks call together."""
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
    return state if keep else HeldElsewhere(service.names, None)


def answer_with_whole_weights(
    model: nn.Module, collect: Callable[[], Mapping[str, Tensor]]
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
            if is_main_process:
                log.warning(
                    "ds_autoplan: rank %d leaves save_pretrained to the first rank of its node.",
                    dist.get_rank(),
                )
            return None
        return save(save_directory, is_main_process=is_main_process, state_dict=whole, **kwargs)

    model.state_dict = state_dict
    model.save_pretrained = save_pretrained

"""A script that counts what a rank keeps under a plan: its states, and what autograd saves."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.scripts.loops import make_model

# The last call is the first of an accumulation: gradients are whole, optimizer states are there.
CALLS = 3


class Held:
    """A saved tensor; the count hears when autograd drops it."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        self.address = tensor.untyped_storage().data_ptr()

    def __del__(self) -> None:
        self.saved.drop(self.address)


class Saved:
    """Bytes of the storages that autograd keeps for backward, parameters aside: now and at most.

    At the most also what pipeline stages keep of the hidden states they sent.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.parameters = list(engine.module.parameters())
        self.uses: dict[int, int] = {}
        self.kept: dict[int, tuple[int, ...]] = {}
        self.now = self.peak = 0
        self.at_peak: list[tuple[int, ...]] = []

    def keep(self, tensor: Tensor) -> Tensor | Held:
        """A tensor that autograd saves -> what it saves in its place."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # Looked up each time: ZeRO stage 3 gathers a parameter where it is used.
        if any(p.untyped_storage().data_ptr() == address for p in self.parameters):
            return tensor
        self.uses[address] = self.uses.get(address, 0) + 1
        if address not in self.kept:
            self.kept[address] = (storage.nbytes(), *tensor.shape)
            self.now += storage.nbytes()
            self.compare()
        return Held(self, tensor)

    def compare(self) -> None:
        """Note what is kept, if it is the most so far."""
        outputs = getattr(self.engine, "pipe_buffers", {}).get("outputs", [])
        sent = storages(output for output in outputs if isinstance(output, Tensor))
        now = self.now + sum(size for at, size in sent.items() if at not in self.kept)
        if now > self.peak:
            self.peak, self.at_peak = now, sorted(self.kept.values(), reverse=True)

    def drop(self, address: int) -> None:
        """Autograd needs one use less of a storage."""
        self.compare()
        self.uses[address] -= 1
        if not self.uses[address]:
            del self.uses[address]
            self.now -= self.kept.pop(address)[0]

    @staticmethod
    def give(item: Tensor | Held) -> Tensor:
        """What :meth:`keep` returned -> the tensor."""
        return item.tensor if isinstance(item, Held) else item


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of each storage."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def reachable() -> list[Tensor]:
    """All tensors of floating-point numbers that Python can reach."""
    gc.collect()
    tensors: list[Tensor] = []
    for item in gc.get_objects():
        if not issubclass(type(item), Tensor) or not item.is_floating_point():
            continue
        if item.layout == torch.strided and item.device.type != "meta":
            tensors.append(item)
            if item.is_leaf and item.grad is not None:
                tensors.append(item.grad)
    return tensors


def weights(engine: Any) -> dict[int, int]:
    """What this rank holds of the model's parameters."""
    return storages(getattr(p, "ds_tensor", p) for p in engine.module.parameters())


def optimizer_states(engine: Any) -> dict[int, int]:
    """Moments, and the parameters that the optimizer updates (copies, under ZeRO)."""
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    tensors = [p for group in inner.param_groups for p in group["params"]]
    # Stage 3 puts its copy of the parameters into the groups for the length of a step only.
    tensors += getattr(engine.optimizer, "fp32_partitioned_groups_flat", [])
    for state in inner.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return storages(tensors)


def stage_buffers(engine: Any) -> dict[int, int]:
    """DeepSpeed's buffers for hidden states, and their gradients, on their way between stages."""
    tensors: list[Tensor] = []
    names = ("pipe_buffers", "pipe_recv_buf", "grad_layer")
    waiting = [getattr(engine, name, None) for name in names]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Tensor):
            tensors.append(item)
            if item.is_leaf and item.grad is not None:
                tensors.append(item.grad)
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, (list, tuple)):
            waiting += item
    return storages(tensors)


def count(
    sizes: dict[str, Any], config: dict[str, Any], samples: int, length: int
) -> dict[str, Any]:
    """Train some calls and count.

    Returns:
        Bytes by name: "parameters", "optimizer", "gradients" (what else is alive between backward
        and step), "activations" (the most that autograd and sent hidden states took during a call;
        "shapes" tells of what), "left" (what autograd keeps after it) and "buffers" (hidden states
        between stages, after it).
    """
    # Held on to: what dies later leaves its address to what is counted.
    others = reachable()
    before = storages(others)
    model = make_model(**sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    inputs = torch.randint(sizes["vocab_size"], (samples, length))
    for _ in range(CALLS):
        saved = Saved(engine)
        with torch.autograd.graph.saved_tensors_hooks(saved.keep, saved.give):
            loss = engine(input_ids=inputs, labels=inputs, use_cache=False).loss
            engine.backward(loss)
        del loss
        held, alive, own = weights(engine), storages(reachable()), optimizer_states(engine)
        buffers = stage_buffers(engine)
        engine.step()
    own = {address: size for address, size in own.items() if address not in held}
    known = before.keys() | held.keys() | own.keys() | buffers.keys()
    gradients = {address: size for address, size in alive.items() if address not in known}
    engine.destroy()
    del others
    return {
        "rank": dist.get_rank(),
        "parameters": sum(held.values()),
        "optimizer": sum(own.values()),
        "gradients": sum(gradients.values()),
        "activations": saved.peak,
        "left": saved.now,
        "buffers": sum(buffers.values()),
        "shapes": saved.at_peak,
    }

"""One replica at work: what happens between the script's call of the model and the answer it gets.

The replica takes the place of the model's `forward`, so every way into the model (the engine, the
model object that Trainer evaluates with) passes here. Under pp = 1 a call runs as one graph:
exchange, the model's own forward over the samples of all ranks, own loss and own logits back;
autograd runs through. A call that is cut into several micro-batches, or that runs through pipeline
stages, has its backward done before it returns (see engine.py and pipeline.py): its loss only
releases it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ds_autoplan.integrations.deepspeed.exchange import ReplicaBatch, exchange
from ds_autoplan.integrations.deepspeed.loss import LossFunction, LossShares
from ds_autoplan.integrations.deepspeed.ownership import OwnLogits, OwnRows
from ds_autoplan.integrations.megatron import state
from ds_autoplan.integrations.megatron.random import ReplicaRandom, draws_in_training
from ds_autoplan.integrations.transformers.stage import StageCut
from ds_autoplan.integrations.transformers.structure import ModelStructure
from megatron.core import parallel_state
from torch import Tensor, nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.plan import Plan


@dataclass(frozen=True)
class MicroBatch:
    """What a replica runs at a time: the model's inputs, and whose they are."""

    inputs: dict[str, Any]
    shares: LossShares | None
    num_samples: int


class UnavailableOutput:
    """Stands for an output that this way of running does not give; any use says why."""

    def __init__(self, name: str, reason: str, remedy: str) -> None:
        """Name the output, why it is missing, and what gives it."""
        self._autoplan_message = f"The model's output {name!r} is not available. {reason} {remedy}"

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(self._autoplan_message)

    def __getattr__(self, name: str) -> Any:
        """Refuse every attribute."""
        raise UnsupportedError(self._autoplan_message)

    __getitem__ = __len__ = __iter__ = __bool__ = __float__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _refuse

    @classmethod
    def __torch_function__(cls, _: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse every torch function."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                raise UnsupportedError(value._autoplan_message)
        raise UnsupportedError("An output of the model is not available under this plan.")


class Replica:
    """Runs a model's calls under a plan. Installed on the model by :meth:`install`."""

    def __init__(
        self,
        plan: Plan,
        structure: ModelStructure,
        cut: StageCut | None,
        device: torch.device,
        logits_in_training: bool,
    ) -> None:
        """Take the plan and the model, sharded and cut already.

        Args:
            plan: what runs.
            structure: the model's structure.
            cut: this rank's stage, None under pp = 1.
            device: where batches go.
            logits_in_training: whether a training call that has labels also returns logits.
        """
        self.plan, self.structure, self.cut, self.device = plan, structure, cut, device
        self.logits_in_training = logits_in_training
        self.model: nn.Module = structure.model
        self.setting = state.current()
        self.group = parallel_state.get_model_parallel_group()
        self.size = dist.get_world_size(self.group)
        self.rank = dist.get_rank(self.group)
        self.forward = self.model.forward
        # Trainer chooses a dataset's columns by the arguments of the model's forward.
        self.__signature__ = self.signature = inspect.signature(self.forward)
        vocab = structure.vocab_size
        self.vocabulary_is_sharded = plan.vocabulary == "shard" and plan.degrees.tp > 1
        self.loss_function = LossFunction(vocab, self.vocabulary_is_sharded)
        self.random = _random(self.model, device)
        self.prepared: MicroBatch | None = None
        self.run_stages: Callable[[dict[str, Any]], Any] | None = None

    def install(self) -> None:
        """Take the place of the model's forward and loss function."""
        self.model.forward = self
        self.model.loss_function = self.loss_function
        self.model.autoplan = self
        if hasattr(self.model, "generate"):
            self.model.generate = self._refuse_to_generate

    def _refuse_to_generate(self, *_: Any, **__: Any) -> Any:
        degrees = self.plan.degrees
        raise UnsupportedError(
            f"generate was called under tp {degrees.tp} and pp {degrees.pp}.",
            "Generation keeps a cache of whole heads on every rank, which a shard does not have.",
            "Save the model (save_pretrained), open it with from_pretrained and generate there.",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, as a data-parallel rank sees it."""
        if self.prepared is not None:
            return self.run(self.prepared)
        inputs = self.bind(args, kwargs)
        if self.run_stages is not None:
            return self.run_stages(inputs)
        return self.run_graph(inputs)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; those that are None are left out."""
        bound = self.signature.bind(*args, **kwargs).arguments
        for parameter in self.signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(parameter.name, {}))
        for name in ("output_attentions", "output_hidden_states"):
            if bound.get(name) or getattr(self.model.config, name, False):
                raise UnsupportedError(
                    f"The model was called with {name}.",
                    "Under tp or pp a rank holds a part of them only.",
                    'Leave it off, or set "tensor_parallel": false and "pipeline": false.',
                )
        if "inputs_embeds" in bound:
            raise UnsupportedError(
                "The model was called with inputs_embeds.",
                "Batches are exchanged as token ids.",
                "Pass input_ids.",
            )
        return {name: value for name, value in bound.items() if value is not None}

    def exchange(self, inputs: dict[str, Any]) -> ReplicaBatch:
        """Gather the batches of the ranks; `return_dict` and caches stay with the caller."""
        state.require(self.setting)
        sent = {k: v for k, v in inputs.items() if k not in ("return_dict", "use_cache")}
        parallel = any(layer.strategy.sequence_parallel for layer in self.plan.layers)
        multiple = self.plan.degrees.tp if parallel else 1
        return exchange(sent, self.group, self.device, multiple)

    def whole(self, batch: ReplicaBatch) -> MicroBatch:
        """The whole call as one micro-batch."""
        shares = LossShares.of(batch) if _has_labels(batch.tensors) else None
        return MicroBatch(self._inputs(batch, batch.tensors), shares, batch.num_samples)

    def micro_batches(self, batch: ReplicaBatch) -> Iterator[MicroBatch]:
        """Cut a call into micro-batches of the plan's size, all of equal shape.

        The last one is filled up with samples that do not count.
        """
        whole, size = self.whole(batch), self.plan.degrees.micro_batch_size
        for start in range(0, batch.num_samples, size):
            index = torch.arange(start, start + size, device=self.device)
            counted = index < batch.num_samples
            index = index.clamp(max=batch.num_samples - 1)
            tensors = {name: value[index] for name, value in batch.tensors.items()}
            shares = None if whole.shares is None else whole.shares.rows(index, counted)
            yield MicroBatch(self._inputs(batch, tensors), shares, size)

    def num_micro_batches(self, batch: ReplicaBatch) -> int:
        """Micro-batches that :meth:`micro_batches` gives."""
        return -(-batch.num_samples // self.plan.degrees.micro_batch_size)

    def _inputs(self, batch: ReplicaBatch, tensors: dict[str, Tensor]) -> dict[str, Any]:
        inputs = {**tensors, **batch.others, "use_cache": False, "return_dict": True}
        inputs.pop("num_items_in_batch", None)
        return inputs

    def run(self, micro_batch: MicroBatch, received: Tensor | None = None) -> Any:
        """Run one micro-batch through what this rank holds of the model."""
        if self.random is None or not self.model.training:
            return self._run(micro_batch, received)
        with self.random.micro_batch():
            return self._run(micro_batch, received)

    def _run(self, micro_batch: MicroBatch, received: Tensor | None) -> Any:
        self.loss_function.shares = micro_batch.shares
        inputs = dict(micro_batch.inputs)
        if self.cut is None:
            return self.forward(**inputs)
        if not self.cut.is_last:
            for name in ("labels", "shift_labels"):
                inputs.pop(name, None)
        return self.cut.run(self.forward, received, inputs)

    def random_state(self) -> Any:
        """The random state before a call, for :meth:`replaying`."""
        return None if self.random is None else self.random.count

    @contextmanager
    def replaying(self, state: Any) -> Iterator[None]:
        """Run a call again with the random numbers it drew."""
        now = self.random_state()
        if self.random is not None:
            self.random.count = state
        try:
            yield
        finally:
            if self.random is not None:
                self.random.count = now

    def run_graph(self, inputs: dict[str, Any]) -> Any:
        """Run a call as one graph (pp = 1); without gradients, micro-batch by micro-batch."""
        batch = self.exchange(inputs)
        if not torch.is_grad_enabled() and self.num_micro_batches(batch) > 1:
            return self._run_without_gradients(inputs, batch)
        output = self.run(self.whole(batch))
        return self.give_back(inputs, batch, output.loss, output.logits)

    def _run_without_gradients(self, inputs: dict[str, Any], batch: ReplicaBatch) -> Any:
        losses: Tensor | None = None
        own: list[Tensor] = []
        start = 0
        for micro_batch in self.micro_batches(batch):
            output = self.run(micro_batch)
            if output.loss is not None:
                losses = output.loss if losses is None else losses + output.loss
            end = min(start + micro_batch.num_samples, batch.num_samples)
            own.append(self._own_logits(output.logits[: end - start], batch.within(start, end)))
            start = end
        loss = None if losses is None else losses[self.rank]
        return self.output(inputs, loss, torch.cat(own)[:, : batch.lengths[batch.rank]])

    def _own_logits(self, logits: Tensor, samples: tuple[int, ...]) -> Tensor:
        """This rank's rows, with the whole vocabulary; `samples` holds each rank's rows."""
        if self.vocabulary_is_sharded:
            return OwnLogits.apply(logits, samples, self.structure.vocab_size, self.group)
        return OwnRows.apply(logits, samples, self.group)

    def give_back(
        self, inputs: dict[str, Any], batch: ReplicaBatch, losses: Tensor | None, logits: Tensor
    ) -> Any:
        """What the script gets: its own loss, its own rows of the logits.

        Args:
            inputs: the script's arguments.
            batch: the exchanged batch.
            losses: loss by source rank, [g], or None.
            logits: the replica's logits (vocabulary sharded or whole).
        """
        loss = None
        if losses is not None:
            loss = OwnRows.apply(losses, (1,) * self.size, self.group)[0]
        own: Any
        if loss is not None and torch.is_grad_enabled() and not self.logits_in_training:
            own = UnavailableOutput(
                "logits",
                '"logits": false is set in "autoplan".',
                "Remove it to get logits in training.",
            )
        else:
            own = self._own_logits(logits, batch.samples)[:, : batch.lengths[batch.rank]]
        return self.output(inputs, loss, own)

    def output(self, inputs: dict[str, Any], loss: Tensor | None, logits: Any) -> Any:
        """The model's output object (or tuple, where the script asked for one)."""
        from transformers.modeling_outputs import CausalLMOutputWithPast

        if inputs.get("return_dict", getattr(self.model.config, "return_dict", True)) is False:
            return (logits,) if loss is None else (loss, logits)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def _has_labels(tensors: dict[str, Tensor]) -> bool:
    return "labels" in tensors or "shift_labels" in tensors


def _random(model: nn.Module, device: torch.device) -> ReplicaRandom | None:
    """The replica's random states, from rank 0's seed; None for a model that draws nothing."""
    seed = torch.tensor([torch.initial_seed() % 2**62], dtype=torch.int64, device=device)
    dist.broadcast(seed, src=0)
    if not draws_in_training(model):
        return None
    replica = parallel_state.get_data_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return ReplicaRandom(int(seed), replica, stage)

"""DeepSpeed's engine under a plan without pipeline stages.

DeepSpeed sees dp = world / g ranks and a micro-batch of `micro * g` samples; the script sees all
ranks and its own `micro`. Calls that the plan cuts into several micro-batches run them here, each
with its backward, so a call needs the activations of one micro-batch only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from ds_autoplan.integrations.deepspeed.checkpoints import Checkpoints
from ds_autoplan.integrations.deepspeed.exchange import ReplicaBatch
from ds_autoplan.integrations.deepspeed.gradients import clip_by_global_norm
from ds_autoplan.integrations.deepspeed.measure import StepClock
from ds_autoplan.integrations.deepspeed.released_loss import (
    ReleasedLoss,
    first_guess,
    gather_factors,
    same_factors,
)
from ds_autoplan.integrations.deepspeed.replica import MicroBatch, Replica, UnavailableOutput
from ds_autoplan.integrations.deepspeed.script_view import ScriptView
from megatron.core import parallel_state
from torch import Tensor

NO_LOGITS = (
    "The call was cut into micro-batches whose backward is already done.",
    'Compute the loss inside the model (labels in the batch), or pin "micro_batch_size" so that a '
    "call is one micro-batch.",
)


@dataclass
class CutCall:
    """A call that ran as several micro-batches: backward is done for all but the last.

    `losses` holds the last one's loss by source rank, with its graph; `factors` what the others'
    backward was done for; `random` the random state before the first. With `losses` None it was
    forward only, of all of them.
    """

    released: ReleasedLoss
    micro_batches: list[MicroBatch]
    losses: Tensor | None
    factors: Tensor
    random: Any


class AutoplanEngine(Checkpoints, ScriptView, DeepSpeedEngine):
    """`deepspeed.initialize` returns this under a plan with pp = 1."""

    replica: Replica | None
    clock: StepClock
    _cut_call: CutCall | None = None
    _factors: Tensor | None = None
    # Whether the script has called the engine in training without a backward.
    _looks_only: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's batch."""
        replica = self.replica
        self.clock.call(self.module.training)
        if replica is None:
            return super().forward(*args, **kwargs)
        self._drop_cut_call()
        inputs = replica.bind(args, kwargs)
        if torch.is_grad_enabled() and "labels" in inputs:
            batch = replica.exchange(inputs)
            if replica.num_micro_batches(batch) > 1:
                return self._forward_and_backward(replica, inputs, batch)
            return self._forward_one(replica, inputs, batch)
        return super().forward(*args, **kwargs)

    def _forward_one(self, replica: Replica, inputs: dict[str, Any], batch: ReplicaBatch) -> Any:
        replica.prepared = replica.whole(batch)
        try:
            output = super().forward()
        finally:
            replica.prepared = None
        return replica.give_back(inputs, batch, output.loss, output.logits)

    def _forward_and_backward(
        self, replica: Replica, inputs: dict[str, Any], batch: ReplicaBatch
    ) -> Any:
        """Forward of all micro-batches and backward of all but the last."""
        if self._factors is None:
            self._factors = first_guess(inputs, self.gradient_accumulation_steps(), replica.size)
        random, micro_batches = replica.random_state(), list(replica.micro_batches(batch))
        if self._looks_only or not self.module.training:
            # Perhaps nobody calls backward: do it then.
            factors, pending = torch.zeros_like(self._factors), None
            with torch.no_grad():
                total = sum(self._losses_of(replica, item) for item in micro_batches)
        else:
            factors = self._factors
            total, pending = self._all_but_the_last(replica, micro_batches, factors)
        released = ReleasedLoss(total[replica.rank])
        self._cut_call = CutCall(released, micro_batches, pending, factors, random)
        unavailable = UnavailableOutput("logits", *NO_LOGITS)
        return replica.output(inputs, released.loss, unavailable)

    def _all_but_the_last(
        self, replica: Replica, micro_batches: list[MicroBatch], factors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of micro-batches, of the last one forward only.

        Returns:
            The sum of their losses by source rank, without a graph, and the last one's, with its
            graph.
        """
        pending = self._losses_of(replica, micro_batches[0])
        total = pending.detach()
        for micro_batch in micro_batches[1:]:
            self._backward_inside(self._objective(pending, factors))
            pending = self._losses_of(replica, micro_batch)
            total = total + pending.detach()
        return total, pending

    def _losses_of(self, replica: Replica, micro_batch: MicroBatch) -> Tensor:
        """Forward of one micro-batch -> its share of the loss of each source rank, [g]."""
        replica.prepared = micro_batch
        try:
            losses: Tensor = super().forward().loss
        finally:
            replica.prepared = None
        return losses

    def _objective(self, losses: Tensor, factors: Tensor) -> Tensor:
        """What backward is called on; the engine divides it by the accumulation steps."""
        scale = self.gradient_accumulation_steps() / factors.numel()
        return (losses * (factors * scale).to(losses)).sum()

    def _backward_inside(self, objective: Tensor) -> None:
        """Backward of a micro-batch that is not the call's last: never an accumulation boundary."""
        boundary = self._is_gradient_accumulation_boundary
        self._is_gradient_accumulation_boundary = False
        try:
            super().backward(objective)
        finally:
            self._is_gradient_accumulation_boundary = boundary

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Backward of the script's loss."""
        call, replica = self._cut_call, self.replica
        if call is None or replica is None:
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        scale = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        factor = call.released.factor(loss) * scale
        self._cut_call = None
        self._factors = factors = gather_factors(factor, replica.group, replica.device)
        if call.losses is None:
            last = self._run_again(replica, call, call.micro_batches, factors)
        else:
            last = self._objective(call.losses, factors)
            if not same_factors(factors, call.factors):
                self._backward_inside(last)
                more = factors - call.factors
                last = self._run_again(replica, call, call.micro_batches[:-1], more)
        super().backward(last)
        return loss.detach() * scale

    def _run_again(
        self, replica: Replica, call: CutCall, micro_batches: list[MicroBatch], factors: Tensor
    ) -> Tensor:
        """Forward and backward of the call's first micro-batches with other factors.

        Returns:
            The objective of the last of them, whose backward is left to the caller.
        """
        with replica.replaying(call.random):
            _, pending = self._all_but_the_last(replica, micro_batches, factors)
        return self._objective(pending, factors)

    def _drop_cut_call(self) -> None:
        """Take back the gradients of a call that the script never called backward on."""
        call, self._cut_call = self._cut_call, None
        if call is not None and call.losses is not None and self.replica is not None:
            begun = call.micro_batches[:-1]
            self._backward_inside(self._run_again(self.replica, call, begun, -call.factors))
            self._looks_only = True

    def clip_fp32_gradients(self) -> None:
        """Clip, and keep the norm (DeepSpeed's own, in fp32 without ZeRO, forgets it)."""
        self._global_grad_norm = clip_by_global_norm(
            self.module.parameters(),
            self.gradient_clipping(),
            parallel_state.get_model_parallel_group(),
        )

    def step(self, lr_kwargs: Any = None) -> None:
        """The optimizer step, at the script's accumulation boundary."""
        self._drop_cut_call()
        boundary = self.is_gradient_accumulation_boundary()
        super().step(lr_kwargs)
        self.note_step()
        self.clock.step(boundary)

"""DeepSpeed's engine under a plan without pipeline stages.

DeepSpeed sees dp = world / g ranks and a micro-batch of `micro * g` samples; the script sees all
ranks and its own `micro`. Calls that the plan cuts into several micro-batches run them here, each
with its backward, so a call needs the activations of one micro-batch only.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from ds_autoplan.integrations.deepspeed.exchange import ReplicaBatch
from ds_autoplan.integrations.deepspeed.gradients import clip_by_global_norm
from ds_autoplan.integrations.deepspeed.measure import StepClock
from ds_autoplan.integrations.deepspeed.released_loss import ReleasedLoss, expected_factor
from ds_autoplan.integrations.deepspeed.replica import Replica, UnavailableOutput
from ds_autoplan.integrations.deepspeed.script_view import ScriptView
from megatron.core import parallel_state
from torch import Tensor

from ds_autoplan.errors import UnsupportedError

NO_LOGITS = (
    "The call was cut into micro-batches whose backward is already done.",
    "Compute the loss inside the model (labels in the batch), or pin "
    '"micro_batch_size" so that a call is one micro-batch.',
)


class AutoplanEngine(ScriptView, DeepSpeedEngine):
    """`deepspeed.initialize` returns this under a plan with pp = 1."""

    replica: Replica | None
    clock: StepClock
    _released: ReleasedLoss | None = None
    _last_objective: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward on this rank's batch."""
        replica = self.replica
        self.clock.call(self.module.training)
        if replica is None:
            return super().forward(*args, **kwargs)
        inputs = replica.bind(args, kwargs)
        if self.module.training and torch.is_grad_enabled() and "labels" in inputs:
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
        expected = expected_factor(inputs, self.gradient_accumulation_steps())
        scale = expected * self.gradient_accumulation_steps() / replica.size
        total: Tensor | None = None
        pending: Tensor | None = None
        for micro_batch in replica.micro_batches(batch):
            if pending is not None:
                self._backward_inside(pending)
            replica.prepared = micro_batch
            try:
                losses = super().forward().loss
            finally:
                replica.prepared = None
            total = losses.detach() if total is None else total + losses.detach()
            pending = losses.sum() * scale
        assert total is not None
        self._last_objective = pending
        self._released = ReleasedLoss.of(total[replica.rank], expected)
        unavailable = UnavailableOutput("logits", *NO_LOGITS)
        return replica.output(inputs, self._released.loss, unavailable)

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
        released, objective = self._released, self._last_objective
        if released is None or objective is None:
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        self._released = self._last_objective = None
        steps = self.gradient_accumulation_steps()
        factor = released.factor(loss, 1.0 / steps if scale_wrt_gas else 1.0)
        if abs(factor - 1.0) > 1e-5:
            raise UnsupportedError(
                f"The loss was scaled by {factor:g} between forward and backward.",
                "A call of several micro-batches has most of its backward done in forward.",
                'Pin "micro_batch_size" in "autoplan" so that a call is one micro-batch.',
            )
        super().backward(objective)
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def clip_fp32_gradients(self) -> None:
        """Clip, and keep the norm (DeepSpeed's own, in fp32 without ZeRO, forgets it)."""
        self._global_grad_norm = clip_by_global_norm(
            self.module.parameters(),
            self.gradient_clipping(),
            parallel_state.get_model_parallel_group(),
        )

    def step(self, lr_kwargs: Any = None) -> None:
        """The optimizer step, at the script's accumulation boundary."""
        boundary = self.is_gradient_accumulation_boundary()
        super().step(lr_kwargs)
        self.note_step()
        self.clock.step(boundary)

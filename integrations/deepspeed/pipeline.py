"""Pipeline stages on DeepSpeed's engine, driven by the script's forward, backward and step.

A call of the engine is one 1F1B pass over the replica's samples: forward runs it, backward releases
the loss, step reduces gradients and updates at the script's accumulation boundary. Every rank holds
the whole batch after the exchange, so a stage reads token ids and masks itself and only hidden
states are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from ds_autoplan.integrations.deepspeed.checkpoints import Checkpoints
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
from torch import Tensor, nn

from ds_autoplan.errors import UnsupportedError

NO_LOGITS = (
    "Pipeline stages compute the loss on the last stage.",
    "Compute the loss inside the model (labels in the batch), or set "
    '"pipeline": false in "autoplan".',
)


class HFStage(nn.Module):
    """The layer DeepSpeed sees: one whole stage of the model."""

    def __init__(self, replica: Replica) -> None:
        """Wrap what this rank holds of the model."""
        super().__init__()
        self.model = replica.model
        self.__dict__["replica"] = replica
        self.queue: list[MicroBatch] = []
        self.losses: Tensor | None = None
        self.logits: list[Tensor] = []
        self.weights: Tensor | None = None

    def begin(self, micro_batches: list[MicroBatch], weights: Tensor | None) -> None:
        """Set what the next forwards run; the objective weighs the losses by source rank."""
        self.queue, self.weights = list(micro_batches), weights
        self.losses, self.logits = None, []

    def forward(self, received: Tensor) -> Tensor:
        """Hidden states of the previous stage -> hidden states, or on the last the objective."""
        replica, micro_batch = self.replica, self.queue.pop(0)
        cut = replica.cut
        assert cut is not None
        output = replica.run(micro_batch, None if cut.is_first else received)
        if not cut.is_last:
            return output.contiguous()
        if output.loss is None:
            self.logits.append(output.logits)
            return output.logits.new_zeros(())
        if not torch.is_grad_enabled():
            self.logits.append(output.logits)
        losses = output.loss.detach()
        self.losses = losses if self.losses is None else self.losses + losses
        if self.weights is None:
            return output.loss.sum()
        return (output.loss * self.weights.to(output.loss)).sum()


class StageModule(PipelineModule):
    """A pipeline of one layer per stage, whose word embedding may be tied across first and last."""

    def __init__(self, replica: Replica) -> None:
        """Build the communicators of the plan's topology around this rank's stage."""
        degrees = replica.plan.degrees
        self.__dict__["replica"] = replica
        topology = PipeModelDataParallelTopology(
            num_pp=degrees.pp, num_mp=degrees.tp, num_dp=degrees.dp
        )
        specs = [LayerSpec(HFStage, replica) for _ in range(degrees.pp)]
        super().__init__(specs, topology=topology, partition_method="uniform")

    @property
    def stage(self) -> HFStage:
        """This rank's stage."""
        return self.forward_funcs[0]

    def __getattr__(self, name: str) -> Any:
        """What the script asks of `engine.module` (config, save_pretrained) the model answers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["replica"].model, name)

    def state_dict(self, *args: Any, destination: Any = None, **kwargs: Any) -> Any:
        """The whole model's weights, as the model answers; nested calls give this stage's own."""
        if args or destination is not None:
            return super().state_dict(*args, destination=destination, **kwargs)
        return self.__dict__["replica"].model.state_dict(**kwargs)

    def _index_tied_modules(self) -> dict[str, Any]:
        structure, cut = self.replica.structure, self.replica.cut
        if not structure.tied:
            return {}
        grid, last = self._grid, self.num_stages - 1
        comms: dict[str, Any] = {}
        for data in range(grid.data_parallel_size):
            for model in range(grid.get_slice_parallel_world_size()):
                ranks = [
                    self._topo.get_rank(pipe=stage, data=data, model=model) for stage in (0, last)
                ]
                group = dist.new_group(ranks=ranks)
                if self.global_rank not in ranks:
                    continue
                holder = structure.embedding if cut.is_first else structure.head
                comms["embedding"] = {
                    "ranks": ranks,
                    "group": group,
                    "weight_attr": ["weight"],
                    "module": holder,
                }
                # DeepSpeed counts a replicated weight once: on the first of its ranks.
                holder.weight.ds_pipe_replicated = self.global_rank != ranks[0]
        return comms

    def get_tied_weights_and_groups(self) -> list[tuple[Tensor, Any]]:
        """The tied weight and the ranks it is tied over."""
        return [(comm["module"].weight, comm["group"]) for comm in self.tied_comms.values()]


class CallSchedule(schedule.TrainSchedule):
    """1F1B without the step at its end: gradients are reduced where the script steps."""

    def steps(self) -> Iterator[list[Any]]:
        """The schedule's instructions."""
        left_out = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
        for commands in super().steps():
            yield [command for command in commands if not isinstance(command, left_out)]


@dataclass
class PassedCall:
    """A call whose forward is done, and whose backward is done for `factors` (zeros: not at all).

    `random` is the random state that it started from.
    """

    released: ReleasedLoss
    micro_batches: list[MicroBatch]
    factors: Tensor
    random: Any


class AutoplanPipelineEngine(Checkpoints, ScriptView, PipelineEngine):
    """`deepspeed.initialize` returns this under a plan with pp > 1."""

    replica: Replica
    clock: StepClock
    module: StageModule
    _call: PassedCall | None = None
    _factors: Tensor | None = None
    # Whether the script has called the engine in training without a backward.
    _looks_only: bool = False
    _shape: tuple[int, ...] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass of this rank's batch through the pipeline, backward included where training."""
        inputs = self.replica.bind(args, kwargs)
        return self.run_stages(inputs)

    def run_stages(self, inputs: dict[str, Any]) -> Any:
        """A call of the model: a training pass, or a forward pass under no_grad or in eval mode."""
        training = torch.is_grad_enabled()
        self.clock.call(training and self.replica.model.training)
        if training and self.replica.model.training and "labels" not in inputs:
            raise UnsupportedError(
                f"The model was called with {sorted(inputs)}, without labels.",
                "Under pipeline stages the loss is computed inside the model, on the last stage.",
                'Pass labels in the batch, or set "pipeline": false in "autoplan".',
            )
        self._drop_call()
        batch = self.replica.exchange(inputs)
        micro_batches = list(self.replica.micro_batches(batch))
        self._note_shape(micro_batches)
        if training and "labels" in inputs:
            return self._train_pass(inputs, micro_batches)
        loss = self._eval_pass(micro_batches) if "labels" in inputs else None
        unavailable = UnavailableOutput("logits", *NO_LOGITS)
        return self.replica.output(inputs, loss, unavailable)

    def _note_shape(self, micro_batches: list[MicroBatch]) -> None:
        """DeepSpeed keeps receive buffers of one shape: renew them where the shape changes."""
        shape = tuple(micro_batches[0].inputs["input_ids"].shape)
        if shape != self._shape:
            self._shape = shape
            self.reset_activation_shape()

    def _train_pass(self, inputs: dict[str, Any], micro_batches: list[MicroBatch]) -> Any:
        replica = self.replica
        if self._factors is None:
            self._factors = first_guess(inputs, self.gradient_accumulation_steps(), replica.size)
        random = replica.random_state()
        if self._looks_only or not replica.model.training:
            # Perhaps nobody calls backward: do it then.
            factors = torch.zeros_like(self._factors)
            loss = self._eval_pass(micro_batches)
        else:
            factors = self._factors
            self._run(micro_batches, factors)
            loss = self._losses()[replica.rank]
        released = ReleasedLoss(loss)
        self._call = PassedCall(released, micro_batches, factors, random)
        unavailable = UnavailableOutput("logits", *NO_LOGITS)
        return replica.output(inputs, released.loss, unavailable)

    def _run(self, micro_batches: list[MicroBatch], factors: Tensor) -> None:
        """Forward and backward; DeepSpeed divides the objective by the accumulation steps."""
        self._compute_loss = True
        self.total_loss = None
        scale = self.gradient_accumulation_steps() / self.replica.size
        self.module.stage.begin(micro_batches, factors * scale)
        self._exec_schedule(
            CallSchedule(
                micro_batches=len(micro_batches), stages=self.num_stages, stage_id=self.stage_id
            )
        )

    def _eval_pass(self, micro_batches: list[MicroBatch]) -> Tensor:
        """Forward only -> this rank's loss."""
        self._compute_loss = True
        self.total_loss = None
        with torch.no_grad():
            self.module.stage.begin(micro_batches, None)
            self._exec_schedule(
                schedule.InferenceSchedule(
                    micro_batches=len(micro_batches),
                    stages=self.num_stages,
                    stage_id=self.stage_id,
                )
            )
            # The receive buffers of a forward-only pass require no gradient.
            self.reset_activation_shape()
            self._shape = None
            return self._losses()[self.replica.rank]

    def _losses(self) -> Tensor:
        """Loss by source rank, on every rank of the replica: [g]."""
        losses = self.module.stage.losses
        if losses is None:
            losses = torch.zeros(self.replica.size, device=self.device)
        group = self.grid.get_pipe_parallel_group()
        dist.broadcast(losses, src=self._loss_stage_global_rank(), group=group)
        return losses

    def _load_micro_batch(self, buffer_id: int) -> None:
        """The first stage reads its micro-batch itself: a token takes the inputs' place."""
        if self.is_first_stage():
            self.pipe_buffers["inputs"][buffer_id] = torch.zeros(1, device=self.device)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Release the loss of the last call; its gradients are computed already."""
        call, replica = self._call, self.replica
        if call is None:
            raise UnsupportedError(
                "backward was called without a call of the engine before it.",
                "Every call has one backward.",
                "Call the engine, then backward on the loss it returned.",
            )
        scale = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        factor = call.released.factor(loss) * scale
        self._call = None
        self._factors = factors = gather_factors(factor, replica.group, replica.device)
        if not same_factors(factors, call.factors):
            self._pass_again(call, factors - call.factors)
        return loss.detach() * scale

    def _pass_again(self, call: PassedCall, factors: Tensor) -> None:
        self._note_shape(call.micro_batches)
        with self.replica.replaying(call.random):
            self._run(call.micro_batches, factors)

    def _drop_call(self) -> None:
        """Take back the gradients of a call that the script never called backward on."""
        call, self._call = self._call, None
        if call is not None and call.factors.any():
            self._pass_again(call, -call.factors)
            self._looks_only = True

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this call ends an accumulation; inside a pass DeepSpeed's own flag."""
        return self._force_grad_boundary

    def _script_boundary(self) -> bool:
        if self._is_gradient_accumulation_boundary is not None:
            return self._is_gradient_accumulation_boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def step(self, lr_kwargs: Any = None) -> None:
        """The optimizer step, at the script's accumulation boundary."""
        self._drop_call()
        boundary = self._script_boundary()
        self._step_applied = False
        if boundary:
            self._exec_reduce_tied_grads()
            self._exec_reduce_grads()
            self._exec_optimizer_step(lr_kwargs)
        self.micro_steps += 1
        self.note_step()
        self.clock.step(boundary)

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all stages (DeepSpeed's own, without ZeRO, sees one stage)."""
        self._global_grad_norm = clip_by_global_norm(
            self.module.parameters(), self.gradient_clipping(), self.replica.group
        )

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        self._reserve_pipe_buffers(pipe_schedule.num_pipe_buffers())
        self.fwd_outputs = []
        for commands in pipe_schedule:
            for command in commands:
                if isinstance(command, schedule.LoadMicroBatch):
                    self._load_micro_batch(**command.kwargs)
                else:
                    run = MethodType(self._INSTRUCTION_MAP[type(command)], self)
                    run(**command.kwargs)
                if isinstance(command, schedule.BackwardPass) and self.is_last_stage():
                    # DeepSpeed drops an output after its backward on all stages but this one,
                    # where its graph would keep what was received, and the gradient of that.
                    self.pipe_buffers["outputs"][command.kwargs["buffer_id"]] = self.loss = None

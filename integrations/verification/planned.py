"""One rank of a run under a plan: a plain DeepSpeed script, whose config has "autoplan".

Between cases everything is taken down, the process group too, so that cases of any world size
follow each other in one set of processes.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from ds_autoplan.integrations.verification.training import (
    CLIPPING,
    Job,
    batch_of,
    build_model,
    make_optimizer,
)
from torch import nn

# How much later than the first rank the others update their weights in a disturbed run.
LATE_S = 0.5


class Rank:
    """Runs cases as one rank of a job."""

    def __init__(self, rank: int) -> None:
        """Take this process's rank; it is also its local rank."""
        import deepspeed

        if not torch.cuda.is_available():
            # Else DeepSpeed compiles a shared-memory operator at its first use.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.rank = rank

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Train under a plan; the request holds the job, the plan's file and where to save."""
        job = Job(**request["job"])
        self._start(job.world, request["rendezvous"])
        engines: list[Any] = []
        try:
            return self._train(job, request, engines)
        finally:
            self._end(engines)

    def _start(self, world: int, rendezvous: str) -> None:
        import deepspeed

        os.environ.update(
            RANK=str(self.rank),
            LOCAL_RANK=str(self.rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
        )
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank)
        _forget_zero_3()
        deepspeed.init_distributed(
            init_method=f"file://{rendezvous}",
            rank=self.rank,
            world_size=world,
            auto_mpi_discovery=False,
        )

    def _end(self, engines: list[Any]) -> None:
        import deepspeed
        from ds_autoplan.integrations.megatron import state

        for engine in engines:
            engine.destroy()
        engines.clear()
        state.destroy()
        gc.collect()
        deepspeed.comm.destroy_process_group()

    def _train(self, job: Job, request: dict[str, Any], engines: list[Any]) -> dict[str, Any]:
        import deepspeed

        model = build_model(job)
        optimizer = make_optimizer(model)
        config = {
            "train_micro_batch_size_per_gpu": job.samples,
            "gradient_accumulation_steps": job.accumulation,
            "gradient_clipping": CLIPPING,
            "zero_optimization": {"stage": request["zero_stage"]},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": request["precision"] == "bf16"},
            "steps_per_print": 10**9,
            "autoplan": {"plan": request["plan"]},
        }
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        engines.append(engine)
        if request["disturb"]:
            _disturb(engine, model, request["disturb"], self.rank)
        losses, norms = [], []
        for call in range(job.calls):
            batch = batch_of(job, call, self.rank, getattr(model.config, "pad_token_id", None))
            batch = {name: value.to(engine.device) for name, value in batch.items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if (call + 1) % job.accumulation == 0:
                norms.append(float(engine.get_global_grad_norm()))
        # As with DeepSpeed alone, all ranks take part where stage 3 has split the weights.
        if self.rank == 0 or request["zero_stage"] == 3:
            model.save_pretrained(request["folder"], is_main_process=self.rank == 0)
        dist.barrier()
        return {"losses": losses, "norms": norms}


def _forget_zero_3() -> None:
    """Undo what ZeRO-3 leaves in a process; some ranks sat out the cases of smaller worlds.

    Its numbering of parameters and modules runs on and must be equal on all ranks. Its own
    `functional.linear` stays, too, and gives gradients in another order than torch's: ranks with
    one and ranks with the other fill ZeRO-2's buckets with different parameters.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from ds_autoplan.integrations.deepspeed.partitioned import forget_linear

    forget_linear()
    Init.param_id = 0
    (count,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    count[0] = 0


def _disturb(engine: Any, model: nn.Module, kind: str, rank: int) -> None:
    """Disturb a run on purpose, to see what the comparison or the pool makes of it.

    "shard" adds to one column of one sharded weight on one rank. "gradient" doubles the gradient of
    one norm on all ranks, as where a sum over tp is done twice. "late": all ranks but the first are
    slow to update their weights, which must not matter. "hang": one rank stops.
    """
    named = list(model.named_parameters())
    if kind == "shard":
        sharded = [p for _, p in named if getattr(p, "tensor_model_parallel", False)]
        matrices = [p for p in sharded if p.dim() == 2]
        if rank == 1:
            with torch.no_grad():
                matrices[-1][:, 0] += 0.1
    elif kind == "gradient":
        norm = next(p for name, p in named if "norm" in name or "ln_" in name)
        norm.register_hook(lambda gradient: gradient * 2)
    elif kind == "late" and rank > 0:
        step = engine.optimizer.step

        def step_late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(LATE_S)
            return step(*args, **kwargs)

        engine.optimizer.step = step_late
    elif kind == "hang" and rank == 1:
        threading.Event().wait()

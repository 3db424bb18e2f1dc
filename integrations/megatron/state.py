"""Megatron-core's parallel state, set to a plan.

Rank r of a job with tp, pp and dp belongs to three groups (Megatron-core's order "tp-cp-ep-dp-pp",
tp fastest). With tp 2, dp 2, pp 2 the tp groups are [0,1] [2,3] [4,5] [6,7], the dp groups [0,2]
[1,3] [4,6] [5,7], and the pp groups [0,4] [1,5] [2,6] [3,7]. A *replica* is one model-parallel
group, the tp * pp ranks that hold one copy of the model: [0,1,4,5] and [2,3,6,7].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import ModelParallelConfig, parallel_state

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.strategy import DEFAULT_ORDER, Degrees

DEEPSPEED_ORDERS = (DEFAULT_ORDER, "tp-dp-pp")


@dataclass(frozen=True)
class Setting:
    """What this module set Megatron-core's parallel state to, and on which process group."""

    tp: int
    pp: int
    dp: int
    world: dist.ProcessGroup


_current: Setting | None = None


def initialize(degrees: Degrees) -> Setting:
    """Set Megatron-core's parallel state to `degrees`.

    A state that this module set to the same degrees stays, so that two engines under equal degrees
    live side by side. Any other is torn down first; an engine that ran under it then refuses to go
    on (see :func:`require`).

    Raises:
        UnsupportedError: the degrees need what the DeepSpeed backend does not run, or another
        world.
    """
    world = dist.get_world_size()
    if degrees.world_size != world:
        raise UnsupportedError(
            f"The plan is for {degrees.world_size} ranks "
            f"(tp {degrees.tp} x pp {degrees.pp} x dp {degrees.dp}), but {world} ranks started.",
            "A plan runs on exactly the ranks it was made for.",
            "Start that many ranks, or remove the pinned plan so that a new one is made.",
        )
    if degrees.cp != 1 or degrees.ep != 1 or degrees.vpp != 1:
        raise UnsupportedError(
            f"The plan asks for cp {degrees.cp}, ep {degrees.ep}, vpp {degrees.vpp}.",
            "The DeepSpeed backend runs cp = ep = vpp = 1.",
            "Plan with --backend deepspeed, or export the plan to Megatron.",
        )
    if degrees.order not in DEEPSPEED_ORDERS:
        raise UnsupportedError(
            f"The plan orders its axes {degrees.order!r}.",
            f"DeepSpeed's pipeline engine fixes the order {DEFAULT_ORDER!r}.",
            "Plan with --backend deepspeed.",
        )
    use_cpu_where_there_is_no_gpu()
    global _current
    wanted = Setting(degrees.tp, degrees.pp, degrees.dp, dist.group.WORLD)
    if parallel_state.model_parallel_is_initialized() and _current == wanted:
        return _current
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=degrees.tp,
        pipeline_model_parallel_size=degrees.pp,
        create_gloo_process_groups=False,
    )
    _current = wanted
    return wanted


def current() -> Setting:
    """What :func:`initialize` set last."""
    assert _current is not None, "the parallel state is set before a model is applied to a plan"
    return _current


def require(setting: Setting) -> None:
    """Check that the parallel state is still what an engine was started under.

    Raises:
        UnsupportedError: a later `deepspeed.initialize` set it to other degrees, or it was torn
        down.
    """
    if _current is not setting:
        now = "it was torn down" if _current is None else f"it is now {_words(_current)}"
        raise UnsupportedError(
            f"The engine was started under {_words(setting)}; {now}.",
            "Megatron-core has one parallel state in a process.",
            'Use one engine after the other, or pin equal degrees for all in "autoplan".',
        )


def _words(setting: Setting) -> str:
    return f"tp {setting.tp} x pp {setting.pp} x dp {setting.dp}"


def destroy() -> None:
    """Tear the parallel state down; nothing happens where there is none.

    The process groups end with torch.distributed's own: an engine's optimizer may still hold them.
    """
    global _current
    _current = None
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()


def use_cpu_where_there_is_no_gpu() -> None:
    """Make Megatron-core allocate on the CPU where torch sees no GPU.

    Its communication buffers are made on `torch.cuda.current_device()`, which raises on a machine
    without CUDA; there it answers the CPU device from now on. With a GPU nothing changes.
    """
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")


def layer_config(dtype: torch.dtype, sequence_parallel: bool) -> ModelParallelConfig:
    """The config Megatron-core's layers take; weights are the model's own: none is initialised."""
    return ModelParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        perform_initialization=False,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )


class MegatronMpu:
    """The model-parallel unit DeepSpeed asks, answered by Megatron-core's parallel state.

    DeepSpeed calls `get_model_parallel_*`, which Megatron-core 0.16 no longer has; for an engine
    without pipeline stages the model-parallel group is the tensor-parallel group. No method may be
    called `initialize_sequence_parallel`: DeepSpeed would take the unit for Ulysses.
    """

    def get_model_parallel_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_rank()

    def get_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_world_size()

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Global rank of the first member of the tensor-parallel group."""
        return parallel_state.get_tensor_model_parallel_src_rank()

    def get_data_parallel_rank(self) -> int:
        """Rank in the data-parallel group."""
        return parallel_state.get_data_parallel_rank()

    def get_data_parallel_world_size(self) -> int:
        """Size of the data-parallel group."""
        return parallel_state.get_data_parallel_world_size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The data-parallel group."""
        return parallel_state.get_data_parallel_group()

    def get_pipeline_model_parallel_rank(self) -> int:
        """Stage of this rank."""
        return parallel_state.get_pipeline_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of stages."""
        return parallel_state.get_pipeline_model_parallel_world_size()

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        """The pipeline-parallel group."""
        return parallel_state.get_pipeline_model_parallel_group()

"""The choices a plan is made of: degrees for the job, a strategy for each layer. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

CHECKPOINTING = ("none", "selective", "full")
ATTENTION_SHARDINGS = ("heads", "replicate")
MLP_SHARDINGS = ("shard", "replicate")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


@dataclass(frozen=True, order=True)
class Strategy:
    """How one layer runs.

    Attributes:
        attention: "heads" (split over tp by heads) or "replicate" (every tp rank computes all
            of it).
        mlp: "shard" (column- then row-parallel) or "replicate".
        sequence_parallel: norms, residuals and dropout run on 1/tp of the sequence; all-gather and
            reduce-scatter replace the all-reduce.
        activation_checkpointing: "none"; "selective": keep the outputs of the linear layers,
            recompute the attention core, norms and activations; "full": keep the block's input
            only.
    """

    attention: str = "heads"
    mlp: str = "shard"
    sequence_parallel: bool = False
    activation_checkpointing: str = "none"


@dataclass(frozen=True, order=True)
class Degrees:
    """The parallel degrees of a job, and what goes with them.

    World size is tp * cp * dp * pp; `ep` divides dp (experts live inside dp). `micro_batch_size` is
    what one replica (tp * pp * cp ranks) runs at a time; `num_micro_batches` is per optimizer step,
    so global_batch_size = dp * micro_batch_size * num_micro_batches. `order` names the axes from
    the fastest-varying rank outward, as Megatron-core does.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    num_micro_batches: int = 1
    order: str = DEFAULT_ORDER

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one replica: tp * cp * pp."""
        return self.tp * self.cp * self.pp

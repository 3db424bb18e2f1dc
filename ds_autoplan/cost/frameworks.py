"""Named behaviours of the engines that train: what they overlap, fuse and allocate.

A framework is data; the pricing code reads it and never asks for a name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

# What a process holds of a GPU outside PyTorch's allocator. NCCL connects at first use since 2.22.
# One ring over 32 channels takes 32 buffers of 10,485,760 bytes; on a node of 8 H100 the process
# held 1.06 GB before its first all-to-all (context and one communicator), 4.34 GB after it: 7 peers
# more (NVIDIA/nccl, issue 1685).
COMMUNICATOR_BYTES = 32 * 10_485_760.0
CONTEXT_BYTES = 1.06e9 - COMMUNICATOR_BYTES
PEER_BYTES = (4.34e9 - 1.06e9) / 7
# Before: rings and trees are connected at once, 688 MiB a communicator on A100 and 544 MiB for two
# ranks (NVIDIA/nccl, issue 964), and CUDA 11 loads all kernels, 1573 MiB on A100 (BigScience's
# chronicles, one tensor of one number).
EARLY_COMMUNICATOR_BYTES = 688 * 2.0**20
EARLY_PEER_BYTES = 544 * 2.0**20
EARLY_CONTEXT_BYTES = 1573 * 2.0**20


@dataclass(frozen=True)
class Framework:
    """One engine's behaviour.

    Attributes:
        name: what messages call it.
        gradient_bytes: bytes per parameter of the buffer gradients accumulate in (0: the
            parameter's own dtype, as PyTorch's `.grad`).
        extra_gradient_bytes: a second gradient per parameter beside that buffer (autograd's own,
            where it is not freed or fused away).
        replicated_copy_bytes: a copy of all gradients, bytes per parameter, that reduction needs
            without ZeRO (DistributedDataParallel's buckets).
        sharded_copy_bytes: the same with ZeRO 1 (gradients put in the order of their owners).
        separate_accumulation: each micro-batch's gradients are added to the kept ones by kernels of
            their own, not by the GEMMs that make them.
        reduce_bytes: bytes per parameter on the wire when gradients are reduced (0: the dtype of
            the gradients).
        master_weights: fp32 copy of low-precision parameters in the optimizer.
        master_gradient_bytes: fp32 gradient of the master copy, bytes per parameter of the shard.
        fp32_partition_copy: ZeRO keeps its own flat copy of the partition in fp32 training too.
        elementwise_passes: memory traffic of norms, residuals and activations relative to fused
            kernels.
        eager_operators: norms, rotary embeddings and gates run operator by operator (eager.py
            counts what these move; the larger of this and `elementwise_passes` holds).
        keeps_gates: a gated MLP keeps its activated gate, as PyTorch's own operators do (0 to 1).
        gathers_linger: what sequence parallelism gathers is not free again within the step: NCCL's
            stream records its use, and the host runs ahead.
        norm_copies: norms keep a 32-bit copy of their input (0 to 1).
        eager_blocks: blocks are Hugging Face's own, and keep what eager.py lists.
        attention: "fused" (cuDNN, FlashAttention-3), "flash" (FlashAttention-2, PyTorch's own),
            "flash1" (FlashAttention-1, Triton's, deterministic ones) or "unfused": scores of size
            s*s are written and read.
        tp_overlap: share of tensor-parallel traffic hidden under GEMMs.
        gradient_overlap: gradient reduction runs under the last backward pass.
        parameter_overlap: the all-gather of updated parameters runs under the next forward pass.
        pipeline_overlap: share of stage-to-stage sends hidden under compute (interleaved stages).
        scatter_sends: tp ranks send a slice each and gather it after the boundary.
        blocking_sends: a stage's four transfers of a micro-batch run one after another, not as two
            exchanges that send and receive at once.
        bucket_elements: gradients that a buffer allocated for good holds.
        zero3_overlap: share of ZeRO-3's gathers that may be prefetched under compute.
        optimizer_bytes_moved: bytes moved per parameter (of the local shard) by the optimizer step.
        step_overhead_s: host work per step: data, scheduler, logging, loss scaling.
        context_bytes: CUDA context and loaded kernels.
        communicators: axes that each NCCL communicator of a rank spans ("tp-pp": both; "all": the
            world; "ends": first and last stage, where they share a weight).
        communicator_bytes: NCCL's buffers for one communicator's collectives.
        peer_bytes: NCCL's buffers for sending to and receiving from one rank.
        pipe_buffers: stages keep the output of each micro-batch in flight until its backward, and
            a buffer to receive into each way (DeepSpeed's pipeline engine).
        fragmentation: share of the dynamic part lost to the allocator.
        bucket_bytes: gradient bucket.
        kernels_per_layer: kernels launched forward for one dense layer (backward: twice).
        kernels_per_moe: further kernels of a mixture layer (routing, permutation, exchange).
        dispatch_stall_s: the device idles per mixture layer and micro-batch (forward and backward
            together), while the host waits for token counts and launches what depends on them.
        expert_stall_s: the same, per local expert.
        permute_passes: times that routed tokens are read or written around the exchange.
        reduce_scatter: ZeRO reduces each gradient to its owner only (False: all-reduce).
        ep_overlap: share of the expert all-to-all hidden under other compute.
        deduplicated_dispatch: a token crosses to a node once, however many of its experts are
            there.
        expert_tp: ways that each expert is split (0: tp). With 1, ep takes its ranks from tp too.
        broadcast_s: latency of each shard's broadcast, where ZeRO broadcasts instead of gathering.
        expert_imbalance: load of the busiest expert rank over the mean.
        selective: what selective checkpointing recomputes: the "attention" core, the "mlp", or
            "operators": all but the core and every second GEMM.
        loss_bytes_moved: bytes per logit that the loss moves forward (fp32 softmax; backward:
            half).
        logit_bytes: bytes per logit alive at the loss's peak.
        sharded_logit_bytes: the same where tp ranks share the vocabulary (0: as `logit_bytes`).
        fused_casts: quantisation is fused into the kernel that makes its input (XLA).
        launch_stall_s: idle time per kernel where launches block (CUDA_LAUNCH_BLOCKING=1).
        interleaved_fragmentation: `fragmentation` with interleaved stages, whose blocks come and
            go in other orders, unless the allocator's segments expand.
        cuda_graphs: launches are replayed from a graph, so the host never limits.
        gathered_under_pp: ZeRO 3 gathers parameters once a step, not in each micro-batch, where the
            model has stages.
        balanced_stages: stages are cut by GEMM size, the head included, not by number of layers.
        default_zero_stage: what the engine does where a run does not say.
        default_sequence_parallel: the same, for tp > 1.
        default_checkpointing: the same.
        default_shard_group: ranks that ZeRO shards over (0: all that hold the same parameters).
    """

    name: str
    gradient_bytes: int = 4
    extra_gradient_bytes: int = 0
    replicated_copy_bytes: int = 0
    sharded_copy_bytes: int = 0
    separate_accumulation: bool = False
    reduce_bytes: int = 0
    master_weights: bool = True
    master_gradient_bytes: float = 0.0
    fp32_partition_copy: bool = False
    elementwise_passes: float = 1.0
    eager_operators: bool = False
    keeps_gates: float = 0.0
    norm_copies: float = 0.0
    gathers_linger: bool = False
    eager_blocks: bool = False
    attention: str = "fused"
    tp_overlap: float = 0.0
    gradient_overlap: bool = True
    parameter_overlap: bool = True
    pipeline_overlap: float = 0.8
    scatter_sends: bool = True
    blocking_sends: bool = False
    bucket_elements: float = 0.0
    zero3_overlap: float = 1.0
    optimizer_bytes_moved: float = 34.0
    step_overhead_s: float = 0.01
    context_bytes: float = CONTEXT_BYTES
    communicators: tuple[str, ...] = ("all", "tp", "dp-cp", "tp-pp", "ends")
    communicator_bytes: float = COMMUNICATOR_BYTES
    peer_bytes: float = PEER_BYTES
    pipe_buffers: bool = False
    fragmentation: float = 0.02
    bucket_bytes: float = 160e6
    kernels_per_layer: int = 30
    kernels_per_moe: int = 40
    dispatch_stall_s: float = 0.6e-3
    expert_stall_s: float = 0.16e-3
    permute_passes: float = 5.0
    reduce_scatter: bool = True
    ep_overlap: float = 0.0
    deduplicated_dispatch: bool = False
    expert_tp: int = 0
    broadcast_s: float = 0.0
    expert_imbalance: float = 1.0
    selective: str = "attention"
    loss_bytes_moved: float = 12.0
    logit_bytes: float = 12.0
    sharded_logit_bytes: float = 0.0
    fused_casts: bool = False
    launch_stall_s: float = 0.0
    interleaved_fragmentation: float = 0.0
    cuda_graphs: bool = False
    gathered_under_pp: bool = False
    balanced_stages: bool = False
    default_zero_stage: int = 1
    default_sequence_parallel: bool = False
    default_checkpointing: str = "none"
    default_shard_group: int = 0

    def wasted(self, vpp: int) -> float:
        """Share of the dynamic part lost to the allocator with `vpp` interleaved chunks."""
        return max(self.fragmentation, self.interleaved_fragmentation if vpp > 1 else 0.0)


MEGATRON = Framework("megatron", default_sequence_parallel=True)
# The groups that DeepSpeed's grid makes and uses beside Megatron's: overflow and norm over a
# replica, reduction, the loss over the stages, tied weights.
DEEPSPEED_COMMUNICATORS = ("all", "tp", "dp-cp", "tp-pp", "pp", "ends")
NEMO = replace(
    MEGATRON,
    name="nemo",
    gradient_bytes=2,
    interleaved_fragmentation=0.43,
    tp_overlap=0.35,
    deduplicated_dispatch=True,
)
MEGATRON_2021 = replace(
    MEGATRON,
    name="megatron-2021",
    gradient_bytes=2,
    attention="unfused",
    gradient_overlap=False,
    parameter_overlap=False,
    pipeline_overlap=0.0,
    default_zero_stage=0,
    default_sequence_parallel=False,
)
MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021,
    name="megatron-deepspeed",
    separate_accumulation=True,
    scatter_sends=False,
    blocking_sends=True,
    master_gradient_bytes=4.0,
    context_bytes=EARLY_CONTEXT_BYTES,
    communicators=DEEPSPEED_COMMUNICATORS,
    communicator_bytes=EARLY_COMMUNICATOR_BYTES,
    peer_bytes=EARLY_PEER_BYTES,
    pipe_buffers=True,
    default_zero_stage=1,
    elementwise_passes=1.65,
    kernels_per_layer=60,
    # PyTorch 1.11's allocator; fitted on BLOOM's runs (DeepSpeed's other constants: 0.05).
    fragmentation=0.1,
)
# BLOOM's training at Jean Zay: launches block (CUDA_LAUNCH_BLOCKING=1 in its scripts). A launch
# that blocks costs at least the way from the host's call to the kernel's start, about 20 us for an
# element-wise kernel of PyTorch on a V100 (NVIDIA's guide to Nsight Systems); fitted on its runs:
# 30 us.
BLOOM = replace(
    MEGATRON_DEEPSPEED,
    name="megatron-deepspeed-blocking",
    launch_stall_s=30e-6,
)

DEEPSPEED = Framework(
    "deepspeed",
    attention="flash",
    gradient_bytes=0,
    separate_accumulation=True,
    reduce_scatter=False,
    eager_blocks=True,
    eager_operators=True,
    expert_imbalance=1.2,
    fp32_partition_copy=True,
    elementwise_passes=1.65,
    gradient_overlap=False,
    parameter_overlap=False,
    pipeline_overlap=0.0,
    zero3_overlap=0.5,
    scatter_sends=False,
    blocking_sends=True,
    bucket_elements=5e8,
    step_overhead_s=0.005,
    communicators=DEEPSPEED_COMMUNICATORS,
    pipe_buffers=True,
    fragmentation=0.05,
    bucket_bytes=1e9,
    kernels_per_layer=60,
)
FSDP = Framework(
    "fsdp",
    eager_operators=True,
    attention="flash1",
    gradient_bytes=0,
    elementwise_passes=1.65,
    keeps_gates=0.5,
    norm_copies=0.5,
    default_zero_stage=3,
)
# What a compiler makes of norms, rotary embeddings and gates.
FUSED: dict[str, Any] = {
    "eager_operators": False,
    "elementwise_passes": 1.0,
    "keeps_gates": 0.0,
    "norm_copies": 0.0,
}
# torchtitan: FSDP2 with PyTorch's attention. Under stages it gathers parameters once a step and
# accumulates whole gradients in 32 bits, as ZeRO 1 does. The backward pass of DTensor's sharded
# loss holds five 32-bit tensors of the logits' size (torch/distributed/tensor/parallel/loss.py).
# It reports what the allocator reserved: 5 to 12% above what is counted, on 8 and on 128 H100
# (benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 3).
TITAN = replace(
    FSDP,
    name="torchtitan",
    attention="flash",
    keeps_gates=1.0,
    norm_copies=1.0,
    selective="operators",
    gathered_under_pp=True,
    default_sequence_parallel=True,
    sharded_logit_bytes=20.0,
    pipe_buffers=True,
    fragmentation=0.1,
)
TITAN_COMPILED = replace(
    TITAN,
    name="torchtitan-compiled",
    **FUSED,
)
# From 2025 on the loss is compiled too: 16-bit logits, their gradient, and a tile of 32 bits.
TITAN_COMPILED_LOSS = replace(
    TITAN_COMPILED, name="torchtitan-2025", logit_bytes=6.0, sharded_logit_bytes=6.0
)
JAX = replace(
    FSDP,
    name="jax",
    **FUSED,
    attention="fused",
    default_checkpointing="full",
    fused_casts=True,
    default_shard_group=128,
)
# By its source and its scaling benchmark's configuration: torch's own split, silu and product in
# the MLP; DistributedDataParallel in the parameters' precision beside the 32-bit gradients, or with
# ZeRO 1 a flat copy of these for a coalesced reduce-scatter; asynchronous gathers on torch 2.1,
# which records streams; 32-bit logits and their softmax at the loss; stages cut by the GEMMs' size,
# the head's among them. Queries, keys and values are put in order, keys and values joined and put
# in order again: copies of 7 h, and 2 I more at the gate, 42 h where fused kernels move 46 h.
NANOTRON = replace(
    MEGATRON,
    name="nanotron",
    attention="flash",
    elementwise_passes=1.9,
    keeps_gates=1.0,
    gathers_linger=True,
    separate_accumulation=True,
    replicated_copy_bytes=2,
    sharded_copy_bytes=4,
    logit_bytes=8.0,
    balanced_stages=True,
    gradient_overlap=False,
)
INTERNEVO = replace(
    MEGATRON,
    name="internevo",
    attention="flash1",
    gradient_bytes=2,
    broadcast_s=2.8e-3,
    elementwise_passes=1.65,
    default_sequence_parallel=False,
    step_overhead_s=0.38,
)
BY_BACKEND = {"megatron": MEGATRON, "deepspeed": DEEPSPEED}

NEMO_GRAPHS = replace(
    NEMO,
    name="nemo-graphs",
    cuda_graphs=True,
    dispatch_stall_s=0.0,
    expert_stall_s=0.0,
    permute_passes=2.0,
    ep_overlap=0.6,
)

# What a run's description says of its engine, first match wins.
BY_PATTERN = (
    (r"ds.autoplan", DEEPSPEED),
    (r"maxtext|paxml|\bjax\b|xla", JAX),
    (r"bridge.*container 26\.(0[6-9]|1).*blackwell", NEMO_GRAPHS),
    (r"nemo|dgxc|bridge|megatron-fsdp", NEMO),
    (r"(?=.*torchtitan)(?=.*(no|without|not) (torch\.)?compile)", TITAN),
    (r"(?=.*torchtitan)(?=.*compile)(?=.*(?<!\d)202[5-9])", TITAN_COMPILED_LOSS),
    (r"(?=.*torchtitan)(?=.*compile)", TITAN_COMPILED),
    (r"torchtitan", TITAN),
    (r"llm-foundry|fsdp|composer", FSDP),
    (r"nanotron", NANOTRON),
    (r"internevo|internlm", INTERNEVO),
    (r"bigscience|launch.blocking", BLOOM),
    (r"megatron.deepspeed|deepspeed.megatron|gpt-neox|mt-nlg", MEGATRON_DEEPSPEED),
    (r"sc21|older readme|2020|2021", MEGATRON_2021),
    (r"megatron", MEGATRON),
    (r"deepspeed|\bzero\b", DEEPSPEED),
)

"""The fitted constants of the cost model: few, physical, named. All else is fact with a source.

"Fitted" means: one value for all runs of an architecture or of the whole data set, found by
minimising the error over the published runs (docs/cost-model.md tells on which, and what the error
is without them).
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Share of the matmul rate of a long synthetic run (Device.matmul_flops) that GEMMs reach inside
# training, where clocks follow the power limit. Fitted per architecture and precision on published
# runs.
SUSTAINED = {
    ("volta", "fp16"): 0.99,
    ("ampere", "bf16"): 0.85,
    ("hopper", "bf16"): 0.835,
    ("hopper", "fp8"): 0.9,
    ("blackwell", "bf16"): 0.7,
    ("blackwell", "fp8"): 0.665,
    ("blackwell", "fp4"): 0.47,
    ("B200", "bf16"): 0.535,
    ("GB300", "bf16"): 0.95,
    ("GB300", "fp8"): 0.91,
    ("GB300", "fp4"): 0.57,
}
SUSTAINED_DEFAULT = 0.85
# Matmul rate as a share of the vendor's peak where no long run was published: A100 0.87, H100
# 0.80, B200 0.78, MI300X 0.51, MI355X 0.63 (stas00/ml-engineering@744d01e18b
# compute/accelerator/README.md).
MATMUL_SHARE = {
    "volta": 0.8,
    "ampere": 0.84,
    "hopper": 0.78,
    "cdna2": 0.6,
    "cdna3": 0.55,
    "cdna4": 0.63,
    "cpu": 0.9,
}
MATMUL_SHARE_DEFAULT = 0.75

# Attention core (fused kernels): share of the matmul rate, forward and backward, on the FLOPs that
# a causal mask leaves. From kernel benchmarks: FlashAttention-2 on A100; FlashAttention-3 and
# cuDNN on H100, cuDNN on B200 (MooreThreads/SimuMax@4dcaae5 configs/system: sdp entries).
# FlashAttention-2 on H100: 35% of the vendor's peak (arXiv 2407.08608, abstract).
ATTENTION_SHARE = {
    ("volta", "fused"): (0.30, 0.24),
    ("ampere", "flash1"): (0.44, 0.352),
    ("ampere", "fused"): (0.60, 0.48),
    ("hopper", "flash1"): (0.255, 0.204),
    ("hopper", "flash"): (0.40, 0.32),
    ("hopper", "fused"): (0.62, 0.496),
    ("blackwell", "flash1"): (0.18, 0.144),
    ("blackwell", "fused"): (0.67, 0.536),
    ("cdna3", "fused"): (0.40, 0.32),
    ("cdna4", "fused"): (0.40, 0.32),
    ("cpu", "fused"): (0.30, 0.30),
}
ATTENTION_SHARE_DEFAULT = (0.5, 0.4)


@dataclass(frozen=True)
class Constants:
    """See the comments; replaced as a whole in calibration runs and in leave-one-out tests."""

    # A GEMM's fixed cost: the last wave of tiles runs part-filled (share of one wave of 128x256
    # tiles).
    tail_waves: float = 0.2
    # Prologue and epilogue of a tile, in columns of the contracted dimension.
    tile_setup_k: float = 100.0
    # Achieved share of the vendor's memory bandwidth in streaming kernels.
    memory_efficiency: float = 0.80
    # GPU time lost between two kernels of one stream.
    kernel_gap_s: float = 1.5e-6
    # What a host thread needs to launch one kernel of an eager PyTorch program.
    host_launch_s: float = 6.0e-6
    # Rows of padding per expert in a grouped GEMM: half a tile.
    expert_padding_rows: float = 64.0
    # Batched GEMMs whose rows are not 16-byte aligned run without tensor cores: share of the fp32
    # peak.
    misaligned_share: float = 0.7
    # Bytes moved per element that is quantised: 2 read, 1 written, 1 for the other GEMM layout.
    # Hopper's fp8 GEMMs take one layout only, so it also transposes, and its scaling recipes
    # search maxima first.
    cast_bytes: float = 4.0
    cast_bytes_hopper: float = 10.0
    # Where the kernel that makes the input quantises it: one more layout is written.
    cast_bytes_fused: float = 1.0
    # Slow-down of the hidden part: compute and communication share memory bandwidth and
    # multiprocessors (PKU-DAIR/Hetu-Galvatron@cea12ff measures 1.1256 on the whole).
    overlap_slowdown: float = 0.12
    # Share of a backward pass under which gradient reduction can hide.
    overlap_window: float = 0.9
    # Share of the network's rate that tensor parallelism over nodes gets: every layer waits for the
    # slowest of many short collectives. Fitted on the two settings that cross nodes of the 3.57B
    # sweep on H100 (tp 16 and 32; huggingface/nanotron).
    tensor_network_share: float = 0.75
    sustained: dict[tuple[str, str], float] = field(
        default_factory=lambda: dict(SUSTAINED), hash=False
    )
    attention_share: dict[tuple[str, str], tuple[float, float]] = field(
        default_factory=lambda: dict(ATTENTION_SHARE), hash=False
    )


DEFAULT = Constants()

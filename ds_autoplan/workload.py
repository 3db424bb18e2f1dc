"""What is trained: batch, sequence, precision, optimizer, engine. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
BACKENDS = ("deepspeed", "megatron")


@dataclass(frozen=True)
class Workload:
    """One training job.

    Attributes:
        seq_length: tokens per sample.
        global_batch_size: samples per optimizer step, over all ranks.
        precision: "bf16", "fp16" (both with fp32 optimizer states), "fp32" or "fp8".
        optimizer: "adamw", "adam", "sgd", "lion", "adafactor": sets the bytes of state
            per parameter.
        backend: "deepspeed" (what integrations/ run) or "megatron" (export).
        gradient_accumulation_steps: engine calls per optimizer step that the user's script
            makes. Under the deepspeed backend one call is one pipeline pass, so the bubble is
            paid once per call. None: the plan may choose (1 is usually fastest).
        gradient_clipping: largest gradient norm, 0 for off.
        trainable_fraction: parameters that get gradients, as a share of all (LoRA, frozen parts).
    """

    seq_length: int
    global_batch_size: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    backend: str = "deepspeed"
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 0.0
    trainable_fraction: float = 1.0

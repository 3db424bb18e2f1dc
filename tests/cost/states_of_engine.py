"""Run in two processes by test_engine_states.py: live bytes of DeepSpeed, stage by stage."""

from __future__ import annotations

import gc
import json
import sys

import deepspeed
import torch
from torch import nn

BUCKET = 4096


def live_bytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    storages = {}
    for item in gc.get_objects():
        if not isinstance(item, torch.Tensor) or item.layout != torch.strided:
            continue
        for tensor in (item, item.grad if item.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def states(precision: str, zero_stage: int) -> float:
    """Bytes per parameter after the first backward of an accumulation, optimizer states present."""
    gc.collect()
    before = live_bytes()
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    count = sum(parameter.numel() for parameter in model.parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": zero_stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 0,
        },
        "bf16": {"enabled": precision == "bf16"},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 256, dtype=dtype)).float().sum())
        held = live_bytes() - before
        engine.step()
    engine.destroy()
    return held / count


def main() -> None:
    """Print one JSON object from rank 0."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    found = {}
    for precision in ("fp32", "bf16"):
        for zero_stage in range(4):
            found[f"{precision} {zero_stage}"] = states(precision, zero_stage)
            gc.collect()
    if torch.distributed.get_rank() == 0:
        print("STATES " + json.dumps(found))
    sys.stdout.flush()


if __name__ == "__main__":
    main()

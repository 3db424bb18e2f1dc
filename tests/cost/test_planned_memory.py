"""What a rank keeps in a run under a plan, counted on four processes, against the estimate.

Each case trains a llama of four layers through `deepspeed.initialize`, in a script that counts
(tests/distributed/scripts/memory.py). The estimate is of the peak: gradients are counted where they
are whole, activations where most micro-batches are in flight.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.cluster import parse_cluster
from ds_autoplan.cost.interface import StageAssignment
from ds_autoplan.cost.model import AnalyticCostModel
from ds_autoplan.model import load_graph
from ds_autoplan.strategy import Strategy
from ds_autoplan.workload import Workload
from tests.distributed.by_hand import plan_by_hand
from tests.distributed.pool import CONFIG, Pool

pytestmark = pytest.mark.distributed

WORLD, SAMPLES, LENGTH, LAYERS, ACCUMULATION = 4, 2, 128, 4, 2
# An odd vocabulary, so that shards of it are padded; no two weights or activations of one size.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": LAYERS,
    "vocab_size": 1001,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}
BUCKET = 4096
ZERO = {
    "reduce_bucket_size": BUCKET,
    "allgather_bucket_size": BUCKET,
    "stage3_prefetch_bucket_size": BUCKET,
    "stage3_param_persistence_threshold": 0,
}
TOLERANCE = 0.03
ITEMS = ("parameters", "gradients", "optimizer", "activations")
# The MLP's up projection, a tp rank's half of it.
LARGEST_WEIGHT_BYTES = 4 * 192 * 512 // 2

SEQUENCE = {"sequence_parallel": True}
FULL = {"activation_checkpointing": "full"}
SELECTIVE = {"activation_checkpointing": "selective"}
CASES: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp, sequence": {"tp": 2, "strategy": SEQUENCE},
    "tp x pp": {"tp": 2, "pp": 2, "micro_batch_size": 2},
    "pp": {"pp": 2, "micro_batch_size": 1},
    "tp, full": {"tp": 2, "strategy": FULL},
    "tp, sequence, selective": {"tp": 2, "strategy": {**SEQUENCE, **SELECTIVE}},
    "ZeRO 1": {"tp": 2, "zero_stage": 1},
    "ZeRO 2": {"tp": 2, "zero_stage": 2},
    "ZeRO 3": {"tp": 2, "zero_stage": 3},
}
MORE: dict[str, dict[str, Any]] = {
    "tp, selective": {"tp": 2, "strategy": SELECTIVE},
    "tp, sequence, full": {"tp": 2, "strategy": {**SEQUENCE, **FULL}},
    "tp, sequence, one sample": {"tp": 2, "micro_batch_size": 1, "strategy": SEQUENCE},
    "tp, whole vocabulary": {"tp": 2, "vocabulary": "replicate"},
    "tp, cut": {"tp": 2, "micro_batch_size": 2},
    "replicated attention": {"tp": 2, "strategy": {"attention": "replicate", **SEQUENCE}},
    "tp x pp, sequence": {"tp": 2, "pp": 2, "micro_batch_size": 2, "strategy": SEQUENCE},
    "pp, full": {"pp": 2, "micro_batch_size": 1, "strategy": FULL},
    "tp x pp, ZeRO 1": {"tp": 2, "pp": 2, "micro_batch_size": 2, "zero_stage": 1},
    "bf16": {"tp": 2, "zero_stage": 1, "precision": "bf16", "strategy": SEQUENCE},
    "dp": {},
    "dp, cut": {"micro_batch_size": 1},
}


def estimate_and_count(
    pool: Pool,
    folder: Path,
    tp: int = 1,
    pp: int = 1,
    micro_batch_size: int = 0,
    zero_stage: int = 0,
    vocabulary: str = "shard",
    precision: str = "fp32",
    strategy: dict[str, Any] | None = None,
) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """(estimated, counted) bytes by name for every rank."""
    planned = plan_by_hand(
        LAYERS,
        tp=tp,
        pp=pp,
        dp=WORLD // (tp * pp),
        zero_stage=zero_stage,
        global_batch_size=SAMPLES * WORLD * ACCUMULATION,
        micro_batch_size=micro_batch_size or SAMPLES * tp * pp,
        strategy=Strategy(**(strategy or {})),
        vocabulary=vocabulary,
    )
    plan = replace(planned, seq_length=LENGTH, precision=precision)
    plan.save(folder / "plan.json")
    config = {
        **CONFIG,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": zero_stage, **ZERO},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "autoplan": {"plan": str(folder / "plan.json")},
    }
    script = "tests.distributed.scripts.memory:count"
    counted = pool.run(script, LLAMA, config, SAMPLES, LENGTH)

    workload = Workload(
        seq_length=LENGTH,
        global_batch_size=plan.global_batch_size,
        precision=precision,
        gradient_accumulation_steps=ACCUMULATION,
    )
    cost = AnalyticCostModel(load_graph(LLAMA), parse_cluster(f"1x{WORLD}xCPU"), workload)
    stages = tuple(
        StageAssignment(
            tuple(range(stage.first_layer, stage.last_layer + 1)),
            tuple(
                layer.strategy for layer in plan.layers[stage.first_layer : stage.last_layer + 1]
            ),
        )
        for stage in plan.stages
    )
    priced = cost.step(plan.degrees, stages, vocabulary).stages
    allocator = 1.0 + cost.framework.wasted(1)
    pairs = []
    for rank in counted:
        stage = rank["rank"] * pp // WORLD
        memory: dict[str, float] = dict(priced[stage].memory)
        memory["activations"] /= allocator
        parallel = plan.layers[0].strategy.sequence_parallel
        memory["buffers"] = cost.stage_buffers(plan.degrees, stage, parallel)[1]
        pairs.append((memory, rank))
    return pairs


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_the_estimate_is_what_a_run_keeps(name: str, pool: Pool, tmp_path: Path) -> None:
    case = {**CASES, **MORE}[name]
    for estimated, counted in estimate_and_count(pool, tmp_path, **case):
        assert counted["left"] == 0, "autograd keeps something after the call"
        # From stage 2 on a rank's part of the gradients ends with a whole weight, and a bucket
        # holds one.
        edge = LARGEST_WEIGHT_BYTES if case.get("zero_stage", 0) >= 2 else 0
        excess = counted["gradients"] - estimated["gradients"]
        assert abs(excess) <= TOLERANCE * estimated["gradients"] + edge, counted
        for item in ("parameters", "optimizer", "activations"):
            assert estimated[item] == pytest.approx(counted[item], rel=TOLERANCE), (item, counted)
        # Beside the buffers a pass leaves its last micro-batch's input, and tokens of one number.
        left = counted["buffers"] - estimated["buffers"]
        assert 0 <= left < estimated["buffers"] + 1024, (estimated, counted)
        total = sum(counted[item] for item in ITEMS)
        assert sum(estimated[item] for item in ITEMS) == pytest.approx(total, rel=TOLERANCE)

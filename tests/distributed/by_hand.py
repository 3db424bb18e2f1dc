"""Plans written by hand, so that tests of the runtime do not depend on what the planner chooses."""

from __future__ import annotations

from ds_autoplan.plan import LayerPlan, Plan, SolverReport, StagePlan
from ds_autoplan.strategy import Degrees, Strategy


def plan_by_hand(
    num_layers: int,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    zero_stage: int = 0,
    global_batch_size: int = 8,
    micro_batch_size: int = 1,
    strategy: Strategy | None = None,
    bounds: list[tuple[int, int]] | None = None,
    vocabulary: str = "shard",
) -> Plan:
    """A plan with one strategy for all layers and an even (or the given) stage cut."""
    strategy = strategy or Strategy()
    if bounds is None:
        edges = [round(stage * num_layers / pp) for stage in range(pp + 1)]
        bounds = list(zip(edges, edges[1:], strict=False))
    stage_of = [s for s, (first, last) in enumerate(bounds) for _ in range(first, last)]
    return Plan(
        model="by hand",
        degrees=Degrees(
            tp=tp,
            pp=pp,
            dp=dp,
            zero_stage=zero_stage,
            micro_batch_size=micro_batch_size,
            num_micro_batches=max(1, global_batch_size // (dp * micro_batch_size)),
        ),
        seq_length=16,
        global_batch_size=global_batch_size,
        precision="fp32",
        backend="deepspeed",
        vocabulary=vocabulary,
        stages=tuple(StagePlan(a, b - 1, 0.0, 0, {}) for a, b in bounds),
        layers=tuple(LayerPlan(index, "", stage, strategy) for index, stage in enumerate(stage_of)),
        step_s=0.0,
        tokens_per_s=0.0,
        tokens_per_s_per_gpu=0.0,
        mfu=0.0,
        uncalibrated_fraction=1.0,
        breakdown_s={},
        solver=SolverReport("by hand", 0.0, 0.0, 0.0, 0.0, 1, 0, 0),
    )

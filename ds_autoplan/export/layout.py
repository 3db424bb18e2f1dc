"""What exporters ask of a plan: its chunks of layers, and whether layers differ."""

from __future__ import annotations

from itertools import groupby

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.plan import LayerPlan, Plan


def chunks(plan: Plan) -> list[list[LayerPlan]]:
    """The layers in the model's order, cut where the stage changes: pp * vpp chunks."""
    return [list(group) for _, group in groupby(plan.layers, key=lambda layer: layer.stage)]


def is_even(plan: Plan) -> bool:
    """Whether all chunks hold the same number of layers."""
    return len({len(chunk) for chunk in chunks(plan)}) == 1


def checkpointing(plan: Plan) -> set[str]:
    """The kinds of activation checkpointing that occur."""
    return {layer.strategy.activation_checkpointing for layer in plan.layers}


def require_sharded_layers(plan: Plan, tool: str) -> None:
    """Refuse plans in which tp leaves a part of a layer, or the vocabulary, whole on each rank."""
    if plan.degrees.tp == 1:
        return
    whole = sorted(
        {
            part
            for layer in plan.layers
            for part in ("attention", "mlp")
            if getattr(layer.strategy, part) == "replicate"
        }
    )
    if plan.vocabulary == "replicate":
        whole.append("vocabulary")
    if whole:
        raise UnsupportedError(
            f"The plan leaves the {' and the '.join(whole)} whole on each of its "
            f"{plan.degrees.tp} tensor-parallel ranks.",
            f"{tool} splits all of a layer, and the vocabulary.",
            f"Pin another tp, or train with this plugin ({plan.backend} backend).",
        )


def require_no(plan: Plan, tool: str, **degrees: int) -> None:
    """Refuse plans whose named degrees are not the given ones."""
    for name, value in degrees.items():
        found = getattr(plan.degrees, name)
        if found != value:
            raise UnsupportedError(
                f"The plan has {name}={found}.",
                f"{tool} runs {name}={value} only.",
                f"Make the plan with --pin {name}={value}.",
            )

"""What exporters ask of a plan: its chunks of layers, whether layers differ, what no tool runs."""

from __future__ import annotations

from ds_autoplan.errors import BadInputError, UnsupportedError
from ds_autoplan.inputs import recall_any
from ds_autoplan.model.graph import BlockGraph
from ds_autoplan.plan import LayerPlan, Plan


def chunks(plan: Plan) -> list[list[LayerPlan]]:
    """The layers in the model's order, as pp * vpp chunks; chunk c is on stage c % pp.

    The first may be empty (the embedding alone), and the last (the head alone).

    Raises:
        BadInputError: the layers' stages are no such chunks.
    """
    stages, last = plan.degrees.pp, plan.degrees.pp * plan.degrees.vpp - 1
    found: list[list[LayerPlan]] = [[]]
    for layer in plan.layers:
        while (len(found) - 1) % stages != layer.stage and len(found) <= last:
            found.append([])
        if (len(found) - 1) % stages != layer.stage:
            raise BadInputError(
                f"The plan's layer {layer.index} lies on stage {layer.stage}, out of order.",
                f"Its {last + 1} chunks go over the {stages} stages in turn.",
                "Make the plan again.",
            )
        found[-1].append(layer)
    return found + [[] for _ in range(last + 1 - len(found))]


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


def graph_of(plan: Plan) -> BlockGraph | None:
    """The model that the plan is of; None for plans made by hand, which do not hold it."""
    inputs = recall_any(plan)
    return inputs.graph if inputs else None


def require_language_model(plan: Plan, tool: str) -> None:
    """Refuse models that are no single chain of blocks over words."""
    graph = graph_of(plan)
    if graph is None:
        return
    read_twice = any(edge.elements_per_token for edge in graph.skip_edges)
    cross = any(block.cross_attention is not None for block in graph.classes)
    bidirectional = any(
        block.attention is not None and not block.attention.causal for block in graph.classes
    )
    if read_twice or cross or bidirectional or not graph.vocab_size:
        raise UnsupportedError(
            f"The plan is of {plan.model} ({graph.model_type}), which is no decoder of words.",
            f"Exported to {tool} are decoder-only language models.",
            "Make the plan with --backend deepspeed and train with this plugin.",
        )


def require_1f1b(plan: Plan, tool: str) -> None:
    """Refuse plans priced for a schedule that the tool would not be told."""
    inputs = recall_any(plan)
    schedule = inputs.options.schedule if inputs else "1f1b"
    if plan.degrees.pp > 1 and schedule != "1f1b":
        raise UnsupportedError(
            f"The plan was priced for the schedule {schedule}, which is for comparison.",
            f"Exported to {tool} are 1F1B plans.",
            "Make the plan without the schedule.",
        )


def require_one_sequence_parallel(plan: Plan, tool: str) -> None:
    """Refuse plans whose layers differ in sequence parallelism."""
    if plan.degrees.tp > 1 and len({x.strategy.sequence_parallel for x in plan.layers}) > 1:
        raise UnsupportedError(
            "The plan's layers differ in sequence parallelism.",
            f"{tool} has one setting for all.",
            "Make the plan with --pin sequence_parallel=true or false.",
        )

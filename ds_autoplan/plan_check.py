"""Whether a plan from a file is one: its parts agree with each other, and its words are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_autoplan.errors import BadInputError
from ds_autoplan.reading import check_types, count, number
from ds_autoplan.strategy import (
    ATTENTION_SHARDINGS,
    CHECKPOINTING,
    DEFAULT_ORDER,
    MLP_SHARDINGS,
    Strategy,
)
from ds_autoplan.workload import BACKENDS, PRECISIONS

if TYPE_CHECKING:
    from ds_autoplan.plan import Plan

COUNTS = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch_size", "num_micro_batches")


def check_plan(plan: Plan) -> None:
    """See that `plan` is whole.

    Raises:
        BadInputError: it is not; says what, and which rule.
        KeyError, TypeError, ValueError: a runner-up or an exclusion lacks what it is shown by.
    """
    check_types(plan, "The plan")
    number(plan.step_s, "The plan's step_s", zero=True)  # made by hand: not priced
    _check_degrees(plan)
    _check_words(plan)
    _check_cut(plan)
    for other in plan.alternatives:
        for name in ("tp", "pp", "dp", "micro_batch_size"):
            count(other[name], f"A runner-up's {name}")
        number(other["step_s"], "A runner-up's step_s")
        str(other["why"]), str(other["zero_stage"])
    for item in plan.excluded:
        dict(item["candidate"]), str(item["reason"])


def _check_degrees(plan: Plan) -> None:
    degrees = plan.degrees
    for name in COUNTS:
        count(getattr(degrees, name), f"The plan's {name}")
    count(plan.seq_length, "The plan's seq_length")
    samples = degrees.dp * degrees.micro_batch_size * degrees.num_micro_batches
    if samples != plan.global_batch_size:
        raise BadInputError(
            f"The plan's global_batch_size is {plan.global_batch_size}.",
            f"It must be dp * micro_batch_size * num_micro_batches = {samples}.",
        )
    if degrees.zero_stage not in range(4):
        raise BadInputError(f"The plan's zero_stage is {degrees.zero_stage}.", "It must be 0 to 3.")
    if sorted(degrees.order.split("-")) != sorted(DEFAULT_ORDER.split("-")):
        raise BadInputError(
            f"The plan's order is {degrees.order!r}.",
            f"It must name each axis of {DEFAULT_ORDER} once.",
        )


def _check_words(plan: Plan) -> None:
    _known(plan.backend, BACKENDS, "backend")
    _known(plan.precision, PRECISIONS, "precision")
    _known(plan.vocabulary, ("shard", "replicate"), "vocabulary")
    for strategy in {layer.strategy for layer in plan.layers}:
        _check_strategy(strategy)


def _check_strategy(strategy: Strategy) -> None:
    _known(strategy.attention, ATTENTION_SHARDINGS, "attention sharding")
    _known(strategy.mlp, MLP_SHARDINGS, "mlp sharding")
    _known(strategy.activation_checkpointing, CHECKPOINTING, "activation_checkpointing")


def _known(value: str, allowed: tuple[str, ...], name: str) -> None:
    if value not in allowed:
        raise BadInputError(
            f"The plan's {name} is {value!r}.", f"It must be one of {', '.join(allowed)}."
        )


def _check_cut(plan: Plan) -> None:
    if [layer.index for layer in plan.layers] != list(range(len(plan.layers))) or not plan.layers:
        raise BadInputError(
            f"The plan lists {len(plan.layers)} layers.", "Each layer must come once, in order."
        )
    held = [stage.last_layer - stage.first_layer + 1 for stage in plan.stages]
    own = [sum(layer.stage == at for layer in plan.layers) for at in range(plan.degrees.pp)]
    firsts = [sum(held[:at]) for at in range(len(held))]
    if held != own or firsts != [stage.first_layer for stage in plan.stages]:
        raise BadInputError(
            f"The plan's stages hold {held} layers, its layers lie on stages as {own}.",
            f"Its pp={plan.degrees.pp} stages must hold all layers in order.",
        )

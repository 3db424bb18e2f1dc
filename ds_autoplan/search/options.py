"""What a user may ask of the planner: pins, limits, baselines. Plain data, validated here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ds_autoplan.errors import BadInputError
from ds_autoplan.reading import number
from ds_autoplan.strategy import ATTENTION_SHARDINGS, CHECKPOINTING, MLP_SHARDINGS

NUMBER_PINS = ("tp", "pp", "dp", "cp", "ep", "vpp", "zero_stage", "micro_batch_size")
CHOICE_PINS: dict[str, tuple[object, ...]] = {
    "sequence_parallel": (False, True),
    "activation_checkpointing": CHECKPOINTING,
    "attention": ATTENTION_SHARDINGS,
    "mlp": MLP_SHARDINGS,
    "vocabulary": ("shard", "replicate"),
    "order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
}
PINS = (*NUMBER_PINS, *CHOICE_PINS)

# Share of the device's memory left free unless the user says otherwise: allocator fragmentation and
# what libraries take behind the framework's back. Stated in every plan as its margin.
DEFAULT_RESERVE = 0.03


@dataclass(frozen=True)
class PlanOptions:
    """What the planner may choose, and how.

    Attributes:
        pins: allowed values per degree; a degree that is absent is free. "attention" and "mlp" pin
            the sharding of each layer's parts where that is legal.
        pipeline: False keeps pp at 1.
        tensor_parallel: False keeps tp at 1.
        memory_reserve_gb: memory (1e9 bytes) to leave free on every device; None leaves 3%.
        time_limit_s: after this many seconds the best plan so far is returned with its gap.
        top_k: how many runners-up to report.
        cost: "topology" (seconds on the links) or "volume" (bytes only, the baseline).
        schedule: "1f1b" or "gpipe" (all micro-batches in flight; for comparison).
        ablation: "" (joint), "inter" (pp and dp only) or "intra" (no pipeline): for comparison.
        prove: also state the winner as one ILP and let HiGHS solve it.
    """

    pins: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    pipeline: bool = True
    tensor_parallel: bool = True
    memory_reserve_gb: float | None = None
    time_limit_s: float | None = None
    top_k: int = 3
    cost: str = "topology"
    schedule: str = "1f1b"
    ablation: str = ""
    prove: bool = False

    def __post_init__(self) -> None:
        """Normalise the pins and refuse what cannot be meant."""
        object.__setattr__(self, "pins", normalise_pins(self.pins))
        for name, allowed in (
            ("cost", ("topology", "volume")),
            ("schedule", ("1f1b", "gpipe")),
            ("ablation", ("", "inter", "intra")),
        ):
            value = getattr(self, name)
            if value not in allowed:
                known = ", ".join(repr(item) for item in allowed)
                raise BadInputError(f"{name} is {value!r}.", f"It must be one of {known}.")
        if self.memory_reserve_gb is not None:
            number(self.memory_reserve_gb, "memory_reserve_gb", zero=True)
        if self.time_limit_s is not None:
            number(self.time_limit_s, "time_limit_s")

    def allows(self, name: str, value: object) -> bool:
        """Whether the pins leave this value open."""
        return name not in self.pins or value in self.pins[name]

    def with_pins(self, **pins: Any) -> PlanOptions:
        """A copy with some pins replaced."""
        from dataclasses import replace

        return replace(self, pins={**self.pins, **pins})


def normalise_pins(pins: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Every pin as a sorted tuple of allowed values.

    Raises:
        BadInputError: an unknown name (the nearest known one is suggested) or an impossible value.
    """
    result: dict[str, tuple[Any, ...]] = {}
    for name, value in pins.items():
        if name not in PINS:
            near = difflib.get_close_matches(name, PINS, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else ""
            raise BadInputError(
                f"There is no degree {name!r} to pin.", f"Known: {', '.join(PINS)}.", hint
            )
        if value is None:
            continue
        many = isinstance(value, Iterable) and not isinstance(value, str)
        values = list(value) if many else [value]
        if not values:
            raise BadInputError(f"The pin {name!r} is an empty list.", "Give at least one value.")
        result[name] = tuple(sorted({_checked(name, item) for item in values}))
    return result


def _checked(name: str, value: object) -> Any:
    if name in NUMBER_PINS:
        least = 0 if name == "zero_stage" else 1
        most = 3 if name == "zero_stage" else None
        good = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not good or (most is not None and isinstance(value, int) and value > most):
            what = "0, 1, 2 or 3" if most else "a positive integer"
            raise BadInputError(f"The pin {name} is {value!r}.", f"It must be {what}.")
        return value
    allowed = CHOICE_PINS[name]
    if value not in allowed or (isinstance(allowed[0], bool) and not isinstance(value, bool)):
        known = ", ".join(str(item) for item in allowed)
        raise BadInputError(f"The pin {name} is {value!r}.", f"It must be one of: {known}.")
    return value


def parse_pins(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Pins from the command line: each "tp=4", "pp=1,2" or "tp=8,pp=2" (names may repeat).

    Raises:
        BadInputError: a part that is not NAME=VALUE, or a bad name or value.
    """
    found: dict[str, list[object]] = {}
    for text in texts:
        name = ""
        for part in text.split(","):
            left, equals, right = part.partition("=")
            if equals:
                name, part = left.strip().replace("-", "_"), right
            if not name or not part.strip():
                raise BadInputError(
                    f"The pin {text!r} cannot be read.",
                    "Pins look like tp=4, pp=1,2 or tp=8,pp=2.",
                )
            found.setdefault(name, []).append(_parsed(name, part.strip()))
    return normalise_pins(found)


def _parsed(name: str, text: str) -> object:
    if name in CHOICE_PINS:
        return {"true": True, "false": False, "on": True, "off": False}.get(text.lower(), text)
    try:
        return int(text)
    except ValueError:
        if name in NUMBER_PINS:
            raise BadInputError(
                f"The pin {name}={text} is no integer.", "Degrees are integers."
            ) from None
        return text

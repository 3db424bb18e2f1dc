"""The `"autoplan"` key of a DeepSpeed config, validated."""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds_autoplan.errors import BadInputError

Degree = int | list[int] | None


class AutoplanConfig(BaseModel):
    """What a user may say about the plan; everything is optional.

    A pin is a value or a list of allowed values; absent means that the planner chooses.
    """

    model_config = ConfigDict(extra="forbid", strict=False)

    enabled: bool = True
    seq_length: int | None = Field(default=None, ge=1)
    cluster: str = "detect"
    calibrate: bool = False
    tp: Degree = None
    pp: Degree = None
    dp: Degree = None
    micro_batch_size: Degree = None
    zero_stage: Degree = None
    activation_checkpointing: str | list[str] | None = None
    sequence_parallel: bool | list[bool] | None = None
    pipeline: bool = True
    tensor_parallel: bool = True
    memory_reserve_gb: float | None = Field(default=None, ge=0)
    plan: str | None = None
    plan_cache: str | None = None
    report: str | None = None
    time_limit_s: float | None = Field(default=None, gt=0)
    on_infeasible: Literal["error", "best_effort"] = "error"
    logits: bool = True

    def pins(self) -> dict[str, list[Any]]:
        """Pinned values by name, each as a list."""
        names = (
            "tp",
            "pp",
            "dp",
            "micro_batch_size",
            "zero_stage",
            "activation_checkpointing",
            "sequence_parallel",
        )
        values = {name: getattr(self, name) for name in names}
        return {
            name: list(value) if isinstance(value, list) else [value]
            for name, value in values.items()
            if value is not None
        }


def parse_autoplan(value: Any) -> AutoplanConfig | None:
    """The `"autoplan"` key's value -> its config, or None where it is off (false or null).

    Raises:
        BadInputError: a key is unknown (the nearest known key is named) or a value is invalid.
    """
    if value is None or value is False:
        return None
    if value is True:
        value = {}
    if not isinstance(value, dict):
        raise BadInputError(
            f'"autoplan" is {value!r}.', "It must be true, false or an object.", "Set it to true."
        )
    known = list(AutoplanConfig.model_fields)
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known)}."
            raise BadInputError(f'"autoplan" has the unknown key {key!r}.', "", hint)
    try:
        config = AutoplanConfig(**value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(item) for item in first["loc"][:1])
        raise BadInputError(
            f'"autoplan"."{place}" is {first["input"]!r}.',
            f"{first['msg']}.",
            "See the table of keys in the README.",
        ) from error
    return config if config.enabled else None

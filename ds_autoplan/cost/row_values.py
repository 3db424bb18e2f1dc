"""The numbers of a row, each read once and refused with its name where it is none."""

from __future__ import annotations

from typing import Any

from ds_autoplan.errors import BadInputError
from ds_autoplan.model.build import MOST_LAYERS
from ds_autoplan.reading import MOST, count, within

LEAST = 1e-9  # of anything measured


def whole_number(value: object, name: str, default: int = 1, most: int = MOST) -> int:
    """A size or degree of a row: a positive integer; `default` where the row says null.

    Raises:
        BadInputError: it is none.
    """
    if value is None or value == "":
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return count(value, f"The row's {name}", most)


def figure(value: object, name: str) -> float | None:
    """A measured figure of a row (seconds, GB, tokens/s), where it states one.

    Raises:
        BadInputError: nothing that was measured.
    """
    return None if value is None else within(value, f"The row's {name}", LEAST, MOST)


def truth(value: object, name: str) -> bool:
    """A row's true or false."""
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    raise BadInputError(f"The row's {name} is {value!r}.", "It must be true, false or null.")


def model_size(model: dict[str, Any], name: str, default: int | None = None) -> int:
    """A size of the row's model; null and 0 mean `default`, where there is one.

    Raises:
        BadInputError: it is no positive integer.
    """
    stated = model[name] if default is None else model.get(name) or None
    if stated is None and default is None:
        raise BadInputError(f"The row's model does not say {name}.")
    most = MOST_LAYERS if "layers" in name else MOST
    return whole_number(stated, f"model {name}", default or 0, most)

"""Reading what users give: JSON files and the numbers in them, each mistake with its place."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ds_autoplan.errors import BadInputError

# What data of another form than expected raises where it is looked into.
MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
LARGEST = 1e300  # of a number of any kind; neither infinite nor nan is below it
MOST = 10**9  # no size, batch or degree of a real job is larger; far larger ones never end


def read_text(path: str | Path, what: str) -> str:
    """The text of a file.

    Raises:
        BadInputError: it is missing, no file, not readable or not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise BadInputError(f"The {what} {str(path)!r} does not exist.") from error
    except UnicodeDecodeError as error:
        raise BadInputError(f"The {what} {str(path)!r} is not UTF-8 text: {error}.") from error
    except (OSError, ValueError) as error:  # ValueError: what no path can be
        reason = getattr(error, "strerror", None) or error
        raise BadInputError(f"The {what} {str(path)!r} cannot be read: {reason}.") from error


def parse_json(text: str, where: str) -> Any:
    """Parsed JSON; `where` begins the message ("The plan file 'x'").

    Raises:
        BadInputError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadInputError(f"{where} is not JSON: {error}.") from error
    except RecursionError as error:
        raise BadInputError(f"{where} is not usable JSON: it nests too deeply.") from error


def read_object(path: str | Path, what: str) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        BadInputError: the file cannot be read or holds something else.
    """
    where = f"The {what} {str(path)!r}"
    data = parse_json(read_text(path, what), where)
    if not isinstance(data, dict):
        raise BadInputError(f"{where} holds no JSON object.")
    return data


def number(value: object, what: str, zero: bool = False) -> float:
    """A finite positive number (or 0, where that is allowed).

    Raises:
        BadInputError: it is none.
    """
    rule = "It must be a finite number, " + ("0 or more." if zero else "more than 0.")
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found) or found < 0 or (found == 0 and not zero):
        raise BadInputError(f"{what} is {_short(value)}.", rule)
    return found


def within(value: object, what: str, least: float, most: float) -> float:
    """A finite number from `least` to `most`: what is physically possible, with room.

    Raises:
        BadInputError: it is none.
    """
    found = number(value, what, zero=least == 0)
    if not least <= found <= most:
        raise BadInputError(f"{what} is {found:g}.", f"It must lie from {least:g} to {most:g}.")
    return found


def text(value: object, what: str) -> str:
    """Text that is not empty.

    Raises:
        BadInputError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise BadInputError(f"{what} is {_short(value)}.", "It must be text.")
    return value


def count(value: object, what: str, most: int = MOST) -> int:
    """A positive integer of at most `most`.

    Raises:
        BadInputError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BadInputError(
            f"{what} is {_short(value)}.", f"It must be a positive integer, at most {most:,}."
        )
    return value


def check_types(value: Any, what: str) -> None:
    """See that a dataclass rebuilt from a file holds what its annotations say.

    Raises:
        BadInputError: a field holds something else.
    """
    hints = get_type_hints(type(value))
    for item in fields(value):
        held = getattr(value, item.name)
        if not _conforms(held, hints[item.name]):
            raise BadInputError(
                f"{what} holds {item.name} = {_short(held)}.",
                f"It must be {_words(hints[item.name])}.",
            )
        for part in held if isinstance(held, tuple) else (held,):
            if is_dataclass(part) and not isinstance(part, type):
                check_types(part, what)


def _conforms(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_conforms(value, each) for each in args)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_conforms(each, args[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_conforms(each, args[1]) for each in value.values())
    if hint in (int, float):
        whole = int if hint is int else (int, float)
        good = isinstance(value, whole) and not isinstance(value, bool)
        return good and abs(value) < LARGEST  # type: ignore[arg-type]
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    names = {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}
    return names.get(hint, "a list" if get_origin(hint) is tuple else "an object of its kind")


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."

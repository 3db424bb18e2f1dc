"""Writing what users asked for: a file whole or not at all, each failure with its place."""

from __future__ import annotations

import os
from pathlib import Path

from ds_autoplan.errors import BadInputError


def write_whole(path: str | Path, text: str, what: str = "file") -> None:
    """Write a file whole, or leave what is there as it is.

    Raises:
        BadInputError: it cannot be written; "The plan file 'x' cannot be written: ...".
    """
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        data = text.encode()
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe
            target.write_bytes(data)
            return
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: what no path or file can hold
        raise BadInputError(
            f"The {what} {str(path)!r} cannot be written: {_reason(error)}."
        ) from error


def make_folder(path: str | Path, what: str = "folder") -> None:
    """Make a folder, and those above it; one that is there is left.

    Raises:
        BadInputError: it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"The {what} {str(path)!r} cannot be made: {_reason(error)}."
        ) from error


def check_writable(path: str | Path) -> None:
    """See that a file can be written there, before work that takes long.

    Raises:
        BadInputError: it cannot.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise BadInputError(
            f"The file {str(path)!r} cannot be written.", "Name a file in a folder that is there."
        )


def _reason(error: Exception) -> object:
    return getattr(error, "strerror", None) or error

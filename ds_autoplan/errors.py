"""The errors of ds_autoplan.

Three things can go wrong and they are three types: the input is bad (:class:`BadInputError`), the
input is fine but nothing can run it (:class:`UnsupportedError`), or everything is fine but no plan
fits (:class:`InfeasibleError`). Each message names the value, the rule it broke and the remedy.
"""

from __future__ import annotations

from typing import Any


class AutoplanError(Exception):
    """Base of every error that a user of ds_autoplan can cause.

    Attributes:
        exit_status: what a command ends with: 2 for bad input, 1 for a clear negative answer.
        details: what `--json` adds to the message, as plain data.
    """

    exit_status = 1

    def __init__(self, value: str, rule: str = "", remedy: str = "") -> None:
        """Build the message from its three parts.

        Args:
            value: what was given or found, and where.
            rule: the rule that it breaks.
            remedy: what the user can do about it.
        """
        self.value, self.rule, self.remedy = value, rule, remedy
        self.details: dict[str, Any] = {}
        super().__init__(" ".join(part for part in (value, rule, remedy) if part))


class BadInputError(AutoplanError):
    """A file, option or key that cannot be taken as it is."""

    exit_status = 2


class UnsupportedError(AutoplanError):
    """A model, or a combination of settings, that this version does not run."""


class InfeasibleError(AutoplanError):
    """No plan satisfies the constraints (memory, divisibility, pins)."""

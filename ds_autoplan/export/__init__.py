"""A plan in the words of other tools: what each can express of it, and what it cannot.

An exporter returns :class:`Export`: files by name, and notes on what the tool does otherwise than
the plan. What a tool cannot do at all is an error; nothing of a plan is dropped silently.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_autoplan.errors import BadInputError

if TYPE_CHECKING:
    from ds_autoplan.plan import Plan

TARGETS = {
    "megatron": "ds_autoplan.export.megatron",
    "deepspeed": "ds_autoplan.export.deepspeed",
    "accelerate": "ds_autoplan.export.deepspeed",
    "torchtitan": "ds_autoplan.export.torchtitan",
}


@dataclass(frozen=True)
class Export:
    """Files by name, and what is said about them."""

    files: dict[str, str]
    notes: tuple[str, ...] = ()


def export(plan: Plan, to: str, plan_path: str) -> Export:
    """The plan for the tool `to`; `plan_path` is where the plan's file lies.

    Raises:
        BadInputError: no such tool.
        UnsupportedError: the tool cannot run the plan; the message says what, and the way out.
    """
    if to not in TARGETS:
        raise BadInputError(f"Plans cannot be exported to {to!r}.", f"Known: {', '.join(TARGETS)}.")
    module = importlib.import_module(TARGETS[to])
    found: Export = getattr(module, f"to_{to}")(plan, plan_path)
    return found

"""ds_autoplan: plans tensor, pipeline and data parallelism for DeepSpeed jobs, and runs the plan.

Importing the package registers its import hook (see :mod:`ds_autoplan.hook`), as the `.pth` file
of an installation does in every Python process. Everything else is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ds_autoplan import hook

if TYPE_CHECKING:
    from ds_autoplan.hook import initialize as initialize
    from ds_autoplan.plan import Plan as Plan

__version__ = "0.1.0"

_LAZY = {"Plan": "ds_autoplan.plan", "initialize": "ds_autoplan.hook"}


def __getattr__(name: str) -> object:
    """Import a public name from the module that defines it, on first use."""
    if name == "plan":  # a module that can be called; see its end
        return import_module("ds_autoplan.plan")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names of the module, those not yet imported included."""
    return sorted({*globals(), *_LAZY, "plan"})


def _find_integrations_in_checkout() -> None:
    # In a checkout `integrations/` lies beside this folder, not in it. An installation maps it to
    # `ds_autoplan.integrations`; a Python that finds the checkout first (started in its root, or
    # an editable install) finds it through one more place to search.
    package = Path(__file__).resolve().parent
    root = package.parent
    if not (package / "integrations").is_dir() and (root / "ds_autoplan_hook.pth").is_file():
        __path__.append(str(root))


_find_integrations_in_checkout()
hook.register()

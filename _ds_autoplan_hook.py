"""The start of ds_autoplan in every Python process: watch for the import of `deepspeed`.

The installed `.pth` file imports this module, so it is small and imports only what the interpreter
has already loaded. What is done once `deepspeed` is there stands in `ds_autoplan/hook.py`.
"""

import os
import sys

TYPE_CHECKING = False  # typing's own would cost an import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class DeepSpeedFinder:
    """Finds `deepspeed` as the other finders do, and wraps its `initialize` once it is loaded."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The other finders' spec for `deepspeed`, its loader extended; None for other names."""
        if name != "deepspeed":
            return None
        for finder in sys.meta_path:
            if isinstance(finder, DeepSpeedFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _wrap_after_loading(spec.loader)
                return spec
        return None


def _wrap_after_loading(loader: "Loader") -> None:
    # The loader keeps its type, so that inspect, pkgutil and importlib.resources see what they
    # would see without us; only this one instance's exec_module does something more. (The name is
    # checked because a zip file's loader is one for all its modules.)
    run_body = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        run_body(module)
        if module.__name__ != "deepspeed":
            return
        try:
            from ds_autoplan.hook import wrap_module

            wrap_module(module)
        except Exception as error:
            # Silent where the package is gone and this file was left behind.
            if getattr(error, "name", None) != "ds_autoplan":
                sys.stderr.write(f"ds_autoplan is broken, deepspeed runs without it: {error!r}\n")

    loader.exec_module = exec_module  # type: ignore[method-assign]


def register() -> None:
    """Put the finder first, once. `DS_AUTOPLAN=0` in the environment keeps it out."""
    if os.environ.get("DS_AUTOPLAN") != "0" and not any(
        isinstance(finder, DeepSpeedFinder) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, DeepSpeedFinder())


register()

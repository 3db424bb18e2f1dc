"""The import hook: `deepspeed.initialize` plans where the DeepSpeed config asks for it.

When `deepspeed` is first imported, and after its module body ran, `deepspeed.initialize` is
replaced by a thin wrapper, so `from deepspeed import initialize` gets the wrapper too. A call whose
config has no `"autoplan"` key (or has it false or null) goes to DeepSpeed's own function as it
came; only a call that has the key imports the integrations. `DS_AUTOPLAN=0` in the environment
turns the hook off.

`_ds_autoplan_hook.py`, which the installed `.pth` file imports in every Python process, watches
for the import of deepspeed and calls :func:`wrap_module`; `import ds_autoplan` registers the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

KEY = "autoplan"
_MARK = "_ds_autoplan_original"


def enabled() -> bool:
    """Whether the environment leaves the hook on: anything but `DS_AUTOPLAN=0`."""
    return os.environ.get("DS_AUTOPLAN") != "0"


def register() -> None:
    """Wrap `deepspeed.initialize`: now if deepspeed is imported, else when it will be.

    Calling it again changes nothing. With `DS_AUTOPLAN=0` it does nothing.
    """
    if not enabled():
        return
    import _ds_autoplan_hook

    _ds_autoplan_hook.register()
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None:
        wrap_module(deepspeed)


def wrap_module(deepspeed: ModuleType) -> None:
    """Replace `initialize` of the loaded module `deepspeed` by the wrapper, once."""
    original = vars(deepspeed).get("initialize")
    if original is not None and not hasattr(original, _MARK):
        setattr(deepspeed, "initialize", wrap(original))  # noqa: B010


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """DeepSpeed's `initialize`, which plans first where the config asks for it.

    Args:
        original: DeepSpeed's own function.

    Returns:
        A function with the same signature and documentation.
    """
    import functools
    import inspect

    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        if not enabled():
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # raises DeepSpeed's own error
        if not asks_for_plan(given_config(bound.arguments)):
            return original(*args, **kwargs)

        from ds_autoplan.integrations.deepspeed.launch import initialize as planned

        bound.apply_defaults()
        return planned(original, **bound.arguments)

    setattr(initialize, _MARK, original)
    return initialize


def given_config(arguments: Mapping[str, Any]) -> object:
    """The one config that DeepSpeed would take from the arguments of `initialize`.

    `config`, else `config_params`, else what `deepspeed.add_config_arguments` put into `args`.
    Returns None where there is none or, which DeepSpeed refuses, more than one.
    """
    config = arguments.get("config")
    if config is None:
        config = arguments.get("config_params")
    args = arguments.get("args")
    found = [
        value
        for value in (
            config,
            getattr(args, "deepspeed_config", None),
            getattr(args, "deepscale_config", None),
        )
        if value is not None
    ]
    return found[0] if len(found) == 1 else None


def asks_for_plan(config: object) -> bool:
    """Whether a DeepSpeed config, as a dict or in any form of text, has the key switched on.

    A config that cannot be read asks for nothing: DeepSpeed then reports it in its own words.
    """
    if isinstance(config, str):
        try:
            text = config_text(config)
            config = parse_config(text) if KEY in text else None
        except (OSError, ValueError):
            return False
    if not isinstance(config, dict):
        return False
    value = config.get(KEY)
    return value is not None and value is not False


def config_text(config: str) -> str:
    """The text of a config given as DeepSpeed takes it: a file's path, or the text in base64."""
    if os.path.exists(config):
        with open(config) as file:
            return file.read()
    import base64

    return base64.urlsafe_b64decode(config).decode("utf-8")


def parse_config(text: str) -> object:
    """Parse a config's text as DeepSpeed does: JSON with comments, duplicate keys refused."""
    import hjson

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = dict(pairs)
        if len(keys) != len(pairs):
            raise ValueError("duplicate keys")
        return keys

    return hjson.loads(text, object_pairs_hook=unique)


def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`, with the wrapper in place even where the `.pth` file is refused."""
    import deepspeed

    register()
    return deepspeed.initialize(*args, **kwargs)

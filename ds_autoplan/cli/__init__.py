"""The `ds-autoplan` command.

Each command is one module with `configure(parser)` and `run(args) -> int`; only the module of the
command that was asked for is imported, so that planning starts fast and needs no torch. A run ends
with 0 (done), 1 (a clear negative answer) or 2 (bad input), never with a traceback for a user's
mistake.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from ds_autoplan.errors import AutoplanError, BadInputError

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("ds_autoplan.cli.plan", "find the fastest plan that fits"),
    "explain": ("ds_autoplan.cli.explain", "show a plan, or why not another one"),
    "diff": ("ds_autoplan.cli.diff", "show how two plans differ"),
    "estimate": ("ds_autoplan.cli.estimate", "price one setting, every degree given"),
    "validate": ("ds_autoplan.cli.validate", "price measured runs and show the errors"),
    "report": ("ds_autoplan.cli.report", "show a plan as one HTML page"),
    "export": ("ds_autoplan.cli.export", "write a plan in another tool's words"),
    "doctor": ("ds_autoplan.cli.doctor", "check this installation and machine"),
    "calibrate": ("ds_autoplan.cli.calibrate", "measure this cluster's devices and links"),
    "verify": ("ds_autoplan.cli.verify", "train under a plan and compare with one process"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are BadInputError and name the nearest known word."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and leaving."""
        hint = f"See `{self.prog} --help`."
        if "unrecognized arguments: " in message:
            word = message.split("unrecognized arguments: ")[1].split()[0].split("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]}? {hint}" if near else hint
        raise BadInputError(f"{self.prog.removeprefix('ds-autoplan ')}: {message}.", "", hint)

    def check_options(self, words: Sequence[str]) -> None:
        """Name a misspelt option before the one that is missing for it."""
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in ("--", *self._option_string_actions):
                self.error(f"unrecognized arguments: {word}")


def available() -> dict[str, tuple[str, str]]:
    """The commands whose module is installed."""
    return {
        name: entry
        for name, entry in COMMANDS.items()
        if importlib.util.find_spec(entry[0]) is not None
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except AutoplanError as error:
        if "--json" in words:
            print(json.dumps({"error": str(error), **error.details}))
        print(f"ds-autoplan: {error}", file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has gone; nothing left to tell it
        return 0
    except KeyboardInterrupt:
        print("ds-autoplan: interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    commands = available()
    if not words or words[0] in ("-h", "--help"):
        print(_usage(commands))
        return 0 if words else 2
    if words[0] == "--version":
        from ds_autoplan import __version__

        print(__version__)
        return 0
    name = words[0]
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1, cutoff=0.4)
        hint = f"Did you mean {near[0]!r}?" if near else f"Commands: {', '.join(commands)}."
        raise BadInputError(f"There is no command {name!r}.", "", hint)
    module = importlib.import_module(commands[name][0])
    parser = Parser(
        prog=f"ds-autoplan {name}",
        description=commands[name][1][0].upper() + commands[name][1][1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    parser.check_options(words[1:])
    status: int = module.run(parser.parse_args(words[1:]))
    return status


def _usage(commands: dict[str, tuple[str, str]]) -> str:
    lines = ["usage: ds-autoplan COMMAND ...   (ds-autoplan COMMAND --help for each)", ""]
    lines += [f"  {name:<10} {text}" for name, (_, text) in commands.items()]
    return "\n".join(lines)

"""Types of command-line arguments, their error messages, and the directory of the run that a command reads."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. Those of argparse begin with the usage, and many options hide what is wrong."""

    hints: Mapping[str, str] = {}
    """By option that it does not have: what to do instead."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Spellings with underscores, as of torchrun, are accepted too, and not shown in help and errors."""
        others = {f"--{name[2:].replace('-', '_')}" for name in names if name.startswith("--")} - {*names}
        action = super().add_argument(*names, *others, **options)
        action.option_strings = [name for name in action.option_strings if name not in others]
        return action

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The options that this may be short for: two spellings of one are no two options."""
        found: list[Any] = super()._get_option_tuples(option_string)
        return list({id(one[0]): one for one in found}.values())

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Unrecognized arguments are an error of the subcommand that they follow."""
        found, extra = super().parse_known_args(args, namespace)
        if extra:
            names = [word.partition("=")[0].replace("_", "-") for word in extra]
            hint = next((f". {self.hints[name]}" for name in names if name in self.hints), "")
            self.error(f"unrecognized arguments: {' '.join(extra)}{hint}")
        return found, extra

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the options are listed, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}. See {self.prog} --help.\n")


DEBUG = "show tracebacks when the command fails"


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Accept --debug after a subcommand too; without a default there, which would override the first one."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG)


def number(kind: Callable[[str], Any], accepts: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """An `int` or a `float` that is accepted; `wanted` ends the error message."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            if accepts(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


def at_least(least: int, *, otherwise: str = "") -> Callable[[str], int]:
    return number(int, lambda value: value >= least, f"a whole number of {least} or more{otherwise}")


positive = number(float, lambda value: 0 < value < math.inf, "a number greater than 0")


def add_run(parser: argparse.ArgumentParser) -> None:
    """The directory of a run, for `run_directory`."""
    parser.add_argument("run_dir", nargs="?", metavar="RUN", help="the directory of a run (default: the latest)")


def run_directory(given: str | None) -> Path:
    """The directory `given`, or that of the latest run; which one that is, is written to stderr."""
    from gradwire.observe.rings.runs import find_run, start_time  # not every command needs it

    directory = find_run(given, os.environ)
    if given is None:
        began = start_time(directory)
        print(f"gradwire: the latest run: {directory}{f', started {began}' if began else ''}", file=sys.stderr)
    return directory

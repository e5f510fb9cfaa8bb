"""Types of command-line arguments, and their error messages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. Those of argparse begin with the usage, and many options hide what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where the options are listed, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message.rstrip('.')}. See {self.prog} --help.\n")


DEBUG = "show tracebacks when the command fails"


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Accept --debug after a subcommand too; without a default there, which would override the first one."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=DEBUG)
    parser.set_defaults(parser=parser)


def parse(parser: argparse.ArgumentParser, words: Sequence[str], args: argparse.Namespace) -> argparse.Namespace:
    """Like `parse_args` into `args`, but unrecognized arguments are an error of the subcommand, with its `hints`."""
    args, extra = parser.parse_known_args(words, args)
    if extra:
        hints: dict[str, str] = getattr(args, "hints", {})
        names = [word.partition("=")[0].replace("_", "-") for word in extra]
        hint = next((f". {hints[name]}" for name in names if name in hints), "")
        args.parser.error(f"unrecognized arguments: {' '.join(extra)}{hint}")
    for name in ("parser", "hints"):
        vars(args).pop(name, None)
    return args


def at_least(least: int) -> Callable[[str], int]:
    """An integer of `least` or more.

    >>> at_least(1)("3")
    3
    >>> at_least(1)("none")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'none' is not a whole number of 1 or more
    """

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return value

    return parse


def positive(text: str) -> float:
    """A number greater than 0.

    >>> positive("0.5")
    0.5
    >>> positive("-1")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: '-1' is not a number greater than 0
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0")
    return value

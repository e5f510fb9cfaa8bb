"""Types of command-line arguments, and what is shown when one is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def add_debug(parser: argparse.ArgumentParser) -> None:
    """Take --debug after a subcommand too, where people write it; without a default there, which would undo the one before."""
    parser.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show full tracebacks when it fails"
    )
    parser.set_defaults(parser=parser)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """As `parse_args`, but what is not understood is an error of the subcommand, with its usage. `hints` is that subcommand's."""
    args, extra = parser.parse_known_args(words)
    if extra:
        hints: dict[str, str] = getattr(args, "hints", {})
        names = [word.partition("=")[0].replace("_", "-") for word in extra]
        told = next((f". {hints[name]}" for name in names if name in hints), "")
        args.parser.error(f"unrecognized arguments: {' '.join(extra)}{told}")
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


def list_of(parse: Callable[[str], int]) -> Callable[[str], list[int]]:
    """Values with commas between them, in ascending order and each once.

    >>> list_of(at_least(1))("4,2,2")
    [2, 4]
    """
    return lambda text: sorted({parse(item.strip()) for item in text.split(",")})


_UNITS = {"": 1, "b": 1, "kib": 2**10, "k": 2**10, "mib": 2**20, "m": 2**20, "gib": 2**30, "g": 2**30}


def byte_size(text: str) -> int:
    """A number of bytes, as 4096, 4KiB or 25MiB; K, M and G count by 1024 too.

    >>> byte_size("25 MiB")
    26214400
    >>> byte_size("a lot")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'a lot' is not a number of bytes, as 4096, 4KiB or 25MiB
    """
    digits = text.rstrip("bBiIkKmMgG ")
    unit = _UNITS.get(text[len(digits) :].strip().lower())
    if unit is None or not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as 4096, 4KiB or 25MiB")
    return int(digits) * unit


def positive(text: str) -> float:
    """A number of more than 0.

    >>> positive("0.5")
    0.5
    >>> positive("-1")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: '-1' is not a number of more than 0
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of more than 0")
    return value

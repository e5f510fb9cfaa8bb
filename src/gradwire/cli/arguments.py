"""Types of command-line arguments: what argparse shows when one is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable


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

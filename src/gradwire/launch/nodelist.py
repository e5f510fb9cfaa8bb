"""SLURM's compressed lists of hosts: `node[01-03,07],gpu5` is node01, node02, node03, node07 and gpu5."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gradwire.errors import UsageError

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def hosts(nodelist: str) -> Iterator[str]:
    """Yield the names of a list, in order: a short list may expand to too many hosts to hold in memory.

    A range keeps the width of its first number. Several brackets in a name are combined, the last varying fastest.

    >>> list(hosts("node[01-03,07],gpu5"))
    ['node01', 'node02', 'node03', 'node07', 'gpu5']
    >>> list(hosts("r[8-10]n[0-1]-ib"))
    ['r8n0-ib', 'r8n1-ib', 'r9n0-ib', 'r9n1-ib', 'r10n0-ib', 'r10n1-ib']
    """
    place = 0
    while True:
        parts, place = _name(nodelist, place)
        yield from _product(parts)
        if place == len(nodelist):
            return
        place += 1  # the comma


def _name(text: str, place: int) -> tuple[list[_Part], int]:
    """The parts of the name that begins at `place`, and where it ends: at a comma or at the end."""
    parts: list[_Part] = []
    start = place
    while place < len(text) and text[place] != ",":
        match = _PART.match(text, place)
        if match is None:
            raise _wrong(text, f"a bracket at character {place + 1} is unmatched")
        inside, plain = match.groups()
        parts.append(_Part(text, inside, plain))
        place = match.end()
    if start == place:
        raise _wrong(text, f"there is no name at character {start + 1}")
    return parts, place


class _Part:
    """Fixed text, or the numbers of a bracket; can be iterated repeatedly."""

    def __init__(self, text: str, inside: str | None, plain: str | None) -> None:
        self._plain = plain
        self._ranges: list[tuple[int, int, int]] = []
        for piece in [] if inside is None else inside.split(","):
            match = _RANGE.fullmatch(piece)
            if match is None:
                raise _wrong(text, f"[{inside}] is not a list of numbers and ranges")
            first, last = match[1], match[2] or match[1]
            if int(last) < int(first):
                raise _wrong(text, f"the range {piece} is descending")
            self._ranges.append((int(first), int(last), len(first)))

    def __iter__(self) -> Iterator[str]:
        if self._plain is not None:
            yield self._plain
        for first, last, width in self._ranges:
            for number in range(first, last + 1):
                yield f"{number:0{width}d}"


def _product(parts: list[_Part]) -> Iterator[str]:
    """Like itertools.product, which would expand every range before it yields the first name."""
    if not parts:
        yield ""
        return
    for head in parts[0]:
        for rest in _product(parts[1:]):
            yield head + rest


def _wrong(text: str, what: str) -> UsageError:
    return UsageError(
        f"reading the list of hosts {text!r}: {what}. It should look like node[01-03,07],gpu5; under SLURM it comes from "
        "SLURM_STEP_NODELIST, and MASTER_ADDR can be set to the host of rank 0 instead."
    )

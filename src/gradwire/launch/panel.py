"""A picture at the bottom of a terminal, below the output that keeps scrolling. Knows nothing of what it shows.

Nothing of the terminal's state is changed: the cursor stays visible and input is not read, so nothing has to be restored however
the launcher ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


class Panel:
    """What was drawn last, and how to write above it."""

    def __init__(self, fd: int, *, share: float = 1.0) -> None:
        self.fd = fd
        """The terminal."""
        self._share = share
        """How much of its height the picture may take."""
        self._lines: Sequence[bytes] = ()
        self._drawn = 0

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines that a picture may have."""
        try:
            columns, lines = os.get_terminal_size(self.fd)
        except OSError:
            columns, lines = 0, 0
        columns, lines = columns or 80, lines or 24  # some terminals do not tell
        return max(20, columns - 1), max(
            5, int(self._share * (lines - 1))
        )  # a line that fills the last column may wrap

    def above(self, data: bytes) -> bytes:
        """The bytes that write `data`, whole lines, above the picture."""
        erase = b"\r\x1b[%dA\x1b[J" % self._drawn if self._drawn else b""
        self._drawn = len(self._lines)
        return erase + data + b"".join(line + b"\n" for line in self._lines)

    def replaced(self, lines: Sequence[bytes]) -> bytes:
        """The bytes that draw `lines` instead of the picture before."""
        self._lines = lines
        return self.above(b"")

    def leave(self) -> None:
        """Let the picture scroll away: what is written next follows it."""
        self._drawn, self._lines = 0, ()

    def forget(self) -> None:
        """Something else has written to the terminal: draw the picture again, below that."""
        self._drawn = 0


def find_terminal(environ: Mapping[str, str]) -> int | None:
    """The standard error, or else the output, if it is a terminal on which a picture can be drawn."""
    return next((fd for fd in (2, 1) if os.isatty(fd)), None) if environ.get("TERM", "dumb") != "dumb" else None

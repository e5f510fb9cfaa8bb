"""The launcher's output: whole lines of all ranks, each prefixed with its rank, to the screen and to one log per rank."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from gradwire.launch.lines import LineBuffer, Piece
from gradwire.launch.panel import Panel
from gradwire.launch.tracebacks import TracebackHold

_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # readable on dark and light backgrounds; red is reserved for errors
_RESET = b"\x1b[0m"
_KEPT_LINES, _KEPT_BYTES = 400, 1 << 16


class Screen:
    """One of the launcher's own streams. Writes everything, even if the reader is slow."""

    def __init__(self, fd: int, environ: Mapping[str, str]) -> None:
        self._fd = fd
        self.color = os.isatty(fd) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self.broken = False
        """Whether the reader is gone; output is then dropped."""
        self.panel: Panel | None = None
        """The picture on the same terminal, above which lines are written."""

    def write(self, data: bytes) -> None:
        """Write all of it: whole lines."""
        if data:
            self._write(data if self.panel is None else self.panel.above(data))

    def draw(self, lines: Sequence[bytes]) -> None:
        """Make this the picture below the lines, if there is a panel."""
        if self.panel is not None:
            self._write(self.panel.replaced(lines))

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.broken:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # another process that shares the terminal made it non-blocking
                select.select([], [self._fd], [])
            except OSError:
                self.broken = True

    def prefix(self, rank: int) -> bytes:
        """The prefix of a rank's lines."""
        text = f"[{rank}]".encode()
        return b"\x1b[%dm%s%s " % (_COLORS[rank % len(_COLORS)], text, _RESET) if self.color else text + b" "


class Tail:
    """The last lines of a stream."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._bytes = 0

    def add(self, lines: tuple[bytes, ...]) -> None:
        """Keep these, drop the oldest."""
        for line in lines:
            if len(self._lines) == _KEPT_LINES:
                self._bytes -= len(self._lines[0])
            self._lines.append(line[-_KEPT_BYTES:])
            self._bytes += len(self._lines[-1])
            while self._bytes > _KEPT_BYTES:
                self._bytes -= len(self._lines.popleft())

    @property
    def lines(self) -> list[bytes]:
        """The lines that are kept."""
        return list(self._lines)


class RankStream:
    """Forwards stdout or stderr of one rank to the screen. `hold` delays tracebacks."""

    def __init__(
        self, screen: Screen, prefix: bytes, *, log: BinaryIO | None = None, hold: TracebackHold | None = None
    ) -> None:
        self.tail = Tail()
        self._screen = screen
        self._prefix = prefix
        self._log = log
        self._hold = hold
        self._buffer = LineBuffer()

    def feed(self, data: bytes, *, now: float) -> None:
        """The rank has written `data`."""
        self._take(self._buffer.feed(data, now=now), now)

    def end(self, *, now: float) -> None:
        """The rank has closed the stream."""
        self._take(self._buffer.end(), now)

    @property
    def due(self) -> float | None:
        """When to call `release`, if the rank still runs then."""
        return None if self._hold is None else self._hold.until

    def go_on(self, *, now: float) -> None:
        """The rank has written something to its other stream."""
        if self._hold is not None:
            self._show(self._hold.go_on(now=now))

    def release(self) -> None:
        """Show what is held back."""
        self._show(self.take_held())

    def take_held(self) -> list[bytes]:
        """Remove and return what is held back, so that it is not shown."""
        return [] if self._hold is None else self._hold.release()

    def _take(self, piece: Piece, now: float) -> None:
        if self._log is not None and piece.raw:
            self._log.write(piece.raw)
        if piece.lines:
            self.tail.add(piece.lines)
            self._show(piece.lines if self._hold is None else self._hold.feed(piece.lines, now=now))

    def _show(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._screen.write(b"".join(map(self.line, lines)))

    def line(self, line: bytes) -> bytes:
        """A line as shown."""
        # A rank that does not reset a color must not color the next rank's lines.
        end = _RESET if self._screen.color and b"\x1b" in line else b""
        return self._prefix + line + end + b"\n"

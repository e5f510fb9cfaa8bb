"""The launcher's output: whole lines of all ranks, each prefixed with its rank, to the screen and to one log per rank.

Bytes stay bytes, so invalid UTF-8 is preserved.

Several ranks cannot overwrite lines on one screen: of a progress bar, a line that a carriage return overwrites, one state every
`EVERY` seconds is shown, as a line, and the last state. Logs get every byte.
"""

from __future__ import annotations

import errno
import os
import select
from collections import deque
from collections.abc import Callable, Mapping
from typing import BinaryIO, NamedTuple

EVERY = 1.0
"""Seconds between two states of a progress bar that are shown."""
LONGEST = 1 << 20
"""Bytes after which a line without an end is split, so that no rank can fill the launcher's memory."""
_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)  # readable on dark and light backgrounds; red is reserved for errors
_RESET = b"\x1b[0m"
_KEPT_LINES, _KEPT_BYTES = 20, 1 << 12


class Screen:
    """One of the launcher's own streams. Writes everything, even if the reader is slow."""

    def __init__(self, fd: int, environ: Mapping[str, str]) -> None:
        self._fd = fd
        self.color = os.isatty(fd) and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"
        self.error: OSError | None = None
        """Why nothing can be written anymore; output is then dropped."""
        self.above: Callable[[bytes], None] | None = None
        """How to write lines above a picture on the same terminal."""

    def write(self, data: bytes) -> None:
        """Write all of it: whole lines."""
        if data:
            (self.above or self.write_now)(data)

    def write_now(self, data: bytes) -> None:
        """Write all of it, wherever the cursor is."""
        view = memoryview(data)
        while view and self.error is None:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # another process that shares the terminal made it non-blocking
                select.select([], [self._fd], [])
            except OSError as error:
                self.error = error

    @property
    def reader_is_gone(self) -> bool:
        """Whether the other end of a pipe has been closed."""
        return self.error is not None and self.error.errno == errno.EPIPE

    def prefix(self, rank: int) -> bytes:
        text = f"[{rank}]".encode()
        return b"\x1b[%dm%s%s " % (_COLORS[rank % len(_COLORS)], text, _RESET) if self.color else text + b" "


class Piece(NamedTuple):
    """What to do with some bytes: `raw` goes to logs unchanged, `lines` are shown, each as a separate line."""

    raw: bytes
    lines: tuple[bytes, ...]


class LineBuffer:
    """One stream of bytes, split into lines.

    >>> buffer = LineBuffer()
    >>> buffer.feed(b"one\\ntw", now=0.0)
    Piece(raw=b'one\\n', lines=(b'one',))
    >>> buffer.feed(b"o\\r\\n", now=0.0).lines, buffer.end()
    ((b'two',), Piece(raw=b'', lines=()))
    """

    def __init__(self) -> None:
        self._rest = b""
        self._shown_at = -EVERY

    def feed(self, data: bytes, *, now: float) -> Piece:
        whole, newline, self._rest = (self._rest + data).rpartition(b"\n")
        lines = [_last_state(line) for line in whole.split(b"\n")] if newline else []
        raw = whole + newline
        # The last byte may be half of "\r\n".
        written_over, mark, current = self._rest[:-1].rpartition(b"\r")
        if mark:
            raw += written_over + mark
            self._rest = current + self._rest[-1:]
            if now - self._shown_at >= EVERY and (state := _last_state(written_over)):
                lines.append(state)
                self._shown_at = now
        if len(self._rest) > LONGEST:
            raw += self._rest
            lines.append(self._rest)
            self._rest = b""
        return Piece(raw, tuple(lines))

    def end(self) -> Piece:
        """Flush at the end of the stream: a last line without a line feed is a line too."""
        rest, self._rest = self._rest, b""
        return Piece(rest, (_last_state(rest),) if rest else ())


def _last_state(line: bytes) -> bytes:
    """What a terminal shows of an overwritten line: more or less the last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line


class RankStream:
    """Forwards stdout or stderr of one rank to the screen."""

    def __init__(self, screen: Screen, prefix: bytes, *, log: BinaryIO | None = None) -> None:
        self.tail: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._screen = screen
        self._prefix = prefix
        self._log = log
        self._buffer = LineBuffer()

    def feed(self, data: bytes, *, now: float) -> None:
        self._show(self._buffer.feed(data, now=now))

    def end(self) -> None:
        self._show(self._buffer.end())

    def _show(self, piece: Piece) -> None:
        if self._log is not None and piece.raw:
            try:
                self._log.write(piece.raw)
            except OSError as error:
                self._log = None
                self._screen.write(f"gradwire run: this log is incomplete: {error.strerror}\n".encode())
        if piece.lines:
            self.tail.extend(line[-_KEPT_BYTES:] for line in piece.lines)
            self._screen.write(b"".join(map(self._line, piece.lines)))

    def _line(self, line: bytes) -> bytes:
        # A rank that does not reset a color must not color the next rank's lines.
        end = _RESET if self._screen.color and b"\x1b" in line else b""
        return self._prefix + line + end + b"\n"

"""Splits a rank's bytes into whole lines. Independent of ranks, colors and files; bytes stay bytes, so invalid UTF-8 is preserved.

Note [Progress bars]
A progress bar returns to the start of its line with a carriage return and overwrites it. Several ranks cannot do that on one
screen. So of what is overwritten, one state every `EVERY` seconds is shown, as a line; the last state is shown with the line feed
that follows, or at the end. Logs get every byte.
"""

from __future__ import annotations

from dataclasses import dataclass

EVERY = 1.0
"""Seconds between two states of a progress bar that are shown."""
LONGEST = 1 << 20
"""Bytes after which a line without an end is split, so that no rank can fill the launcher's memory."""


@dataclass(frozen=True, slots=True)
class Piece:
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
        """Process more bytes."""
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

"""Holds back a rank's last traceback until it is known whether it is the one to show.

When one rank fails the others usually fail after it, and every rank prints a traceback: the one that matters is lost among them.
So a traceback on a rank's standard error is held back until the rank ends. If it ends with a failure, the launcher decides what to
show of it. If the rank writes something more than `PAUSE` seconds later, it has continued, so the traceback is shown before that;
in any case it is shown after `HOLD` seconds. Logs get everything at once.
No processes and no clock here.
"""

from __future__ import annotations

from collections.abc import Sequence

HEAD = b"Traceback (most recent call last):"
HOLD = 30.0
"""Maximum seconds that a traceback is held back: a rank closes its group before it exits, which may be slow."""
PAUSE = 1.0
"""Seconds between two lines after which the second no longer belongs to the first."""
_MOST_LINES = 400


class TracebackHold:
    """Filters the lines of one rank's standard error; see the module.

    >>> hold = TracebackHold()
    >>> hold.feed([b"step 1", HEAD, b"ValueError: no"], now=0.0)
    [b'step 1']
    >>> hold.until, hold.held
    (30.0, [b'Traceback (most recent call last):', b'ValueError: no'])
    >>> hold.release(), hold.until
    ([b'Traceback (most recent call last):', b'ValueError: no'], None)
    """

    def __init__(self) -> None:
        self.held: list[bytes] = []
        self._since = self._last = 0.0

    @property
    def until(self) -> float | None:
        """When the held lines must be shown, if the rank has not ended by then."""
        return self._since + HOLD if self.held else None

    def feed(self, lines: Sequence[bytes], *, now: float) -> list[bytes]:
        """The lines to show now."""
        shown = self.go_on(now=now)
        for line in lines:
            if not self.held and not line.endswith(HEAD):
                shown.append(line)
                continue
            if not self.held:
                self._since = now
            self.held.append(line)
            self._last = now
            if len(self.held) > _MOST_LINES:
                shown += self.release()
        return shown

    def go_on(self, *, now: float) -> list[bytes]:
        """The rank has written something, here or to standard output: the lines to show before it."""
        return self.release() if self.held and now - self._last > PAUSE else []

    def release(self) -> list[bytes]:
        """Return the held lines and hold them no longer."""
        held, self.held = self.held, []
        return held

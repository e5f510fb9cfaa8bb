"""What the launcher shows of the run itself: warnings, lines of figures, and the live view on a terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from gradwire.launch.panel import Panel, find_terminal
from gradwire.launch.screen import Screen
from gradwire.observe.monitor import RunMonitor
from gradwire.observe.run_status import RunStatus

Picture = Callable[[RunStatus, int, int], Sequence[bytes]]
"""The status of a run in lines, at most so many columns wide and so many lines high."""
_SHARE = 2 / 3
"""How much of a terminal's height the live view may take: the rest shows what ranks write."""


class Display:
    """Writes to the launcher's screens. Without a monitor there is nothing to show but warnings."""

    def __init__(self, out: Screen, err: Screen, *, monitor: RunMonitor | None, picture: Picture | None) -> None:
        self._out, self._err = out, err
        self._monitor = monitor
        self._picture = picture
        self._panel: Panel | None = None
        if monitor is not None and picture is not None:
            self._panel = _panel(out, err, os.environ)

    @property
    def next_look(self) -> float:
        """When `update` has something to do, on the monotonic clock."""
        return math.inf if self._monitor is None else self._monitor.next_look

    def say(self, lines: Iterable[str]) -> None:
        """Write lines of the launcher's own."""
        self._err.write("".join(f"gradwire run: {line}\n" for line in lines).encode(errors="backslashreplace"))

    def warn(self, lines: Sequence[str]) -> None:
        """Write a warning; the live view and the figures repeat its first line."""
        self.say(lines)
        if self._monitor is not None:
            self._monitor.note(lines)

    def update(self) -> None:
        """Look at the run, if it is time for that."""
        if self._monitor is not None and self._monitor.is_due():
            self.say(self._monitor.check_if_due())
            self.draw()

    def draw(self) -> None:
        """Draw the live view. An error ends it, and not the run."""
        if self._panel is None or self._picture is None or self._monitor is None:
            return
        screen = self._err if self._err.panel is not None else self._out
        try:
            screen.draw(self._picture(self._monitor.status(), *self._panel.size))
        except Exception as error:
            self._panel = self._out.panel = self._err.panel = None
            self.say([f"the live view has ended: {type(error).__name__}: {error}"])

    def continued(self) -> None:
        """The launcher was stopped for a while, and the shell has written to the terminal."""
        if self._panel is not None:
            self._panel.forget()

    def end(self) -> None:
        """Leave the last picture where it is: the report follows."""
        self.draw()
        if self._panel is not None:
            self._panel.leave()


def _panel(out: Screen, err: Screen, environ: Mapping[str, str]) -> Panel | None:
    """A panel on the terminal, for both of its streams, if there is a terminal."""
    terminal = find_terminal(environ)
    if terminal is None:
        return None
    panel = Panel(terminal, share=_SHARE)
    for fd, screen in ((1, out), (2, err)):
        if os.isatty(fd):
            screen.panel = panel
    return panel

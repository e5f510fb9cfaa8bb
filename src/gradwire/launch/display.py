"""What the launcher shows of the run itself: warnings, lines of figures, and the live view on a terminal."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gradwire.launch.screen import Screen
from gradwire.observe.run_status import RunMonitor, RunStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

Picture = Callable[[RunStatus, int, int], "RenderableType"]
"""Draws the status of a run in at most this many columns and lines."""
_SHARE = 2 / 3
"""How much of a terminal's height the live view may take: the rest shows what ranks write."""


class Panel:
    """A picture at the bottom of a terminal, below the lines that scroll by. Nothing has to be restored at its end."""

    def __init__(self, screen: Screen, *, share: float = 1.0) -> None:
        self._screen, self._share = screen, share
        self._live: Live | None = None

    def draw(self, picture: Callable[[int, int], RenderableType]) -> None:
        """Replace the picture by what `picture(columns, lines)` returns."""
        from rich.console import Group
        from rich.segment import Segments

        self._live = live = self._live or _start(self._screen)
        columns, lines = live.console.size
        columns, lines = max(20, columns - 1), max(5, int(self._share * (lines - 1)))  # a full last column may wrap
        drawn = live.console.render(picture(columns, lines), live.console.options.update_width(columns))
        live.update(Group(Segments(list(drawn)), ""), refresh=True)  # it is drawn again below every line of a rank

    def above(self, data: bytes) -> None:
        """Write `data`, whole lines, above the picture."""
        if self._live is None:
            return self._screen.write_now(data)
        from rich.segment import Segment, Segments

        text = data.decode(errors="surrogateescape")
        return self._live.console.print(Segments([Segment(text)]), crop=False, end="")

    def leave(self) -> None:
        """Let the picture scroll away: further lines, and further pictures, are written below it."""
        self._live = None


def _start(screen: Screen) -> Live:
    """A picture on `screen`. rich is imported here, since that is slow and most runs have no live view."""
    from rich.console import Console
    from rich.live import Live

    class Terminal(io.StringIO):
        def write(self, text: str) -> int:
            screen.write_now(text.encode(errors="surrogateescape"))
            return len(text)

    class VisibleCursor(Console):
        def show_cursor(self, show: bool = True) -> bool:
            return False

    console = VisibleCursor(file=Terminal(), force_terminal=True, highlight=False, legacy_windows=False)
    live = Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False, vertical_overflow="visible"
    )
    live.start()
    return live


def find_terminal(environ: Mapping[str, str]) -> int | None:
    """The standard error, or else the output, if it is a terminal on which a picture can be drawn."""
    return next((fd for fd in (2, 1) if os.isatty(fd)), None) if environ.get("TERM", "dumb") != "dumb" else None


class Display:
    """Writes to the launcher's screens. Without a monitor there is nothing to show but warnings."""

    def __init__(self, out: Screen, err: Screen, *, monitor: RunMonitor | None, picture: Picture | None) -> None:
        self._err, self._monitor, self._picture = err, monitor, picture
        self._screens = {1: out, 2: err}
        self._panel: Panel | None = None
        terminal = find_terminal(os.environ)
        if monitor is not None and picture is not None and terminal is not None:
            self._panel = Panel(self._screens[terminal], share=_SHARE)
            for fd, screen in self._screens.items():
                screen.above = self._panel.above if os.isatty(fd) else None

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
        panel, picture, monitor = self._panel, self._picture, self._monitor
        if panel is None or picture is None or monitor is None:
            return
        try:
            panel.draw(lambda columns, lines: picture(monitor.status(), columns, lines))
        except Exception as error:
            self._panel = None
            for screen in self._screens.values():
                screen.above = None
            self.say([f"the live view has ended: {type(error).__name__}: {error}"])

    def continued(self) -> None:
        """The launcher was stopped for a while, and the shell has written to the terminal: draw below that."""
        if self._panel is not None:
            self._panel.leave()

    def end(self) -> None:
        """Leave the last picture where it is: what the monitor has found, and the report, follow."""
        self.draw()
        self.continued()
        if self._monitor is not None:
            self.say(self._monitor.at_end())

"""`RunReport`: what the launcher writes when a run has ended: the first failure, and what became of the other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradwire.launch.first_failure import final_output, raised, shortened, summary
from gradwire.launch.screen import RankStream, Screen
from gradwire.launch.shutdown import Shutdown
from gradwire.observe.rings.run_outcome import Outcome, RankOutcome


def outcome(shutdown: Shutdown, now: float) -> Outcome:
    """How the run has ended, `now` seconds after its start."""
    first, stopped_by = shutdown.first, shutdown.stopped_by
    text = ""
    if first is not None:
        text = summary(first, shutdown.endings)
    elif shutdown.exit_code:
        text = shutdown.lost or (f"stopped by {stopped_by.name} after {now:.1f} s" if stopped_by is not None else "")
    return Outcome(
        text,
        None if first is None else first.rank,
        None if stopped_by is None or not shutdown.exit_code else stopped_by.name,
        tuple(
            RankOutcome(ending.rank, ending.status, ending.stopped, raised(ending.words)) for ending in shutdown.endings
        ),
        time.time(),
    )


class RunReport:
    """Writes to `screen`; `streams` are the ranks' streams of errors, which may hold a traceback back."""

    def __init__(self, screen: Screen, streams: Sequence[RankStream], log_dir: Path | None) -> None:
        self._screen = screen
        self._streams = streams
        self._log_dir = log_dir

    def show(self, shutdown: Shutdown, pids: Sequence[int], text: str) -> None:
        """Report how the run has ended; `pids` are the ranks' processes, `text` is that of the outcome."""
        first = shutdown.first
        if first is not None:
            left_out = self._summarize(ending.rank for ending in shutdown.endings if ending.rank != first.rank)
            if left_out:
                where = f"in full in {self._log_dir}" if self._log_dir is not None else "--debug shows all"
                self._say(
                    f"gradwire run: {left_out} traceback{'s' if left_out > 1 else ''} shortened to one line: {where}"
                )
            if len(pids) > 1 and (words := final_output(first.words)):
                self._say("", f"gradwire run: last output of rank {first.rank}:", *words, "")
            self._say(f"gradwire run: {text}")
        elif shutdown.lost is not None:
            self._summarize(ending.rank for ending in shutdown.endings)
        elif shutdown.stopped_by is not None and shutdown.exit_code:
            self._summarize(ending.rank for ending in shutdown.endings)
            self._say(f"gradwire run: {text}")
        if shutdown.lost is not None and shutdown.exit_code:
            self._say(f"gradwire run: {shutdown.lost}; ranks cannot continue without it. Its output, if any, is above.")
        for rank in sorted(shutdown.running):
            self._say(f"gradwire run: rank {rank} (process {pids[rank]}) is still running, even after SIGKILL")

    def _summarize(self, ranks: Iterable[int]) -> int:
        """Show one line for each traceback that is held back, and return their number."""
        count = 0
        for rank in sorted(ranks):
            stream = self._streams[rank]
            if held := stream.take_held():
                count += 1
                self._screen.write(b"".join(map(stream.line, shortened(held))))
        return count

    def _say(self, *lines: str | bytes) -> None:
        self._screen.write(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))

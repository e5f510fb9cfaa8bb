"""How a run is shut down: which signals to send, given the ranks that ended, the signals received and the time; and its report.

No I/O.

Note [How a run is ended]
After a failure the other ranks get SIGTERM and, if they have not ended after `grace` seconds, SIGKILL. After a failure that looks
like the consequence of another one there is a pause of `NEAR` seconds first, in which the rank that caused it may print its
traceback and exit; SIGTERM would cut its output short.

A signal that the launcher receives is forwarded at once (by the handler, not here). After SIGTERM and SIGHUP, SIGKILL follows
after `grace`. SIGINT and SIGQUIT give ranks as much time as they need, perhaps for a checkpoint; once one of them has failed, the
others get `grace` seconds. If that rank was still starting, the others get SIGTERM `NEAR` seconds later: C code drops an interrupt
that arrives while torch is imported. A rank that exits with 0 after a signal has handled it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from gradwire.launch.first_failure import Ending, first_failure, summary
from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome
from gradwire.runtime.rank_error import NEAR, RankError

LAST_LIMIT = 10.0
"""Seconds after SIGKILL after which the launcher stops waiting: a process may be in an uninterruptible sleep forever."""

_ENDING_SOON = frozenset({signal.SIGTERM, signal.SIGHUP})
STOPPING = _ENDING_SOON | {signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE}

Send = tuple[signal.Signals, tuple[int, ...]]


class Shutdown:
    """The state of a run of `size` ranks."""

    def __init__(self, size: int, *, grace: float) -> None:
        self.running = set(range(size))
        self.endings: list[Ending] = []
        self.stopped_by: signal.Signals | None = None
        """The signal that ended the run, if no rank had failed before."""
        self.lost: str | None = None
        """What was lost that ended the run, if no rank had failed before."""
        self._output_lost = False
        self._grace = grace
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._told_at: float | None = None
        """When ranks were sent the first signal to end."""

    # -- what happens --------------------------------------------------------------------------------------------------

    def ended(self, ending: Ending) -> None:
        """A rank has ended."""
        self.running.discard(ending.rank)
        told = self._told_at is not None and (ending.error is None or ending.error.time >= self._told_at)
        ending = replace(ending, stopped=told or (self._is_ending and ending.status != 0))
        self.endings.append(ending)
        if ending.failed:
            at = ending.after + (NEAR if ending.consequence else 0.0)
            self._stop_at = _earlier(self._stop_at, at)
        elif ending.status != 0 and self._told_at is None:
            self._kill_at = _earlier(self._kill_at, ending.after + self._grace)
            if ending.while_starting:
                self._stop_at = _earlier(self._stop_at, ending.after + NEAR)

    def signalled(self, number: signal.Signals, now: float) -> None:
        """The launcher has received a signal and forwarded it."""
        if number in STOPPING and self._stop_at is None:
            self.stopped_by = self.stopped_by or number
        if number in _ENDING_SOON:
            self._kill_at = _earlier(self._kill_at, now + self._grace)

    def lose(self, what: str, now: float, *, output: bool = False) -> None:
        """The ranks or their output need something that is no longer there: stop them as after a failure.

        The exit code is not 0 if their `output` is lost, even if they end well.
        """
        self._output_lost |= output
        if self.first is None or self.first.consequence:
            self.lost = self.lost or what
        self._stop_at = _earlier(self._stop_at, now)

    @property
    def _is_ending(self) -> bool:
        """Whether the run is already ending, so that further failures are consequences."""
        return self.stopped_by is not None or self.lost is not None

    def kill(self, now: float) -> None:
        """Send SIGKILL without further delay."""
        self._kill_at = now

    def abandon(self, number: signal.Signals, now: float) -> None:
        """The run has become pointless, as when the reader of its output is gone: stop it as after a failure."""
        self.signalled(number, now)
        self._stop_at = _earlier(self._stop_at, now)

    # -- what to do ----------------------------------------------------------------------------------------------------

    def due(self, now: float) -> Iterable[Send]:
        """The signals to send now."""
        ranks = tuple(sorted(self.running))
        if self._stop_at is not None and now >= self._stop_at and self._told_at is None:
            self._told_at = now
            self._kill_at = _earlier(self._kill_at, now + self._grace)
            yield signal.SIGTERM, ranks
        if self._kill_at is not None and now >= self._kill_at and self._give_up_at is None:
            self._told_at = now if self._told_at is None else self._told_at
            self._give_up_at = now + LAST_LIMIT
            yield signal.SIGKILL, ranks

    @property
    def next_time(self) -> float | None:
        """When `due` should be called again if nothing happens before."""
        times = [self._stop_at if self._told_at is None else None]
        times.append(self._give_up_at if self._give_up_at is not None else self._kill_at)
        return min((time for time in times if time is not None), default=None)

    def is_over(self, now: float) -> bool:
        """Whether all ranks have ended, or the remaining ones cannot be killed."""
        return not self.running or (self._give_up_at is not None and now >= self._give_up_at)

    @property
    def first(self) -> Ending | None:
        """The failure to show."""
        return first_failure(self.endings)

    @property
    def exit_code(self) -> int:
        """The exit code of the first failure, else of the signal that ended the run, else 0."""
        first = self.first
        if first is not None:
            return first.exit_code
        badly = bool(self.running) or any(ending.status != 0 for ending in self.endings)
        if self.stopped_by is not None and (badly or self.stopped_by is signal.SIGPIPE):
            return 128 + self.stopped_by
        return 1 if badly or self._output_lost else 0


def _earlier(known: float | None, new: float) -> float:
    return new if known is None else min(known, new)


# -- the end of a run ------------------------------------------------------------------------------------------------------


def outcome(shutdown: Shutdown, now: float) -> RunOutcome:
    """How the run has ended, `now` seconds after its start."""
    first, stopped_by = shutdown.first, shutdown.stopped_by
    text = ""
    if first is not None:
        text = summary(first, shutdown.endings)
    elif shutdown.exit_code:
        text = shutdown.lost or (f"stopped by {stopped_by.name} after {now:.1f} s" if stopped_by is not None else "")
    ranks = (
        RankOutcome(ending.rank, ending.own_status, ending.stopped, None if ending.error is None else ending.error.name)
        for ending in shutdown.endings
    )
    name = None if stopped_by is None or not shutdown.exit_code else stopped_by.name
    return RunOutcome(text, None if first is None else first.rank, name, tuple(ranks), time.time())


def report(
    shutdown: Shutdown,
    text: str,
    *,
    pids: Mapping[int, int],
    tails: Mapping[int, Iterable[bytes]],
    threads: Iterable[RankError],
) -> Iterator[bytes]:
    """The lines about a run that has ended, with the `text` of its outcome.

    `pids` are the ranks' processes, `tails` their last lines on standard error, `threads` the errors of threads.
    """
    first = shutdown.first
    if first is not None and len(pids) > 1:
        shown = [*tails[first.rank]]
        what = "last output"
        if first.error is not None:
            what = "traceback"
            shown = first.error.traceback.encode(errors="backslashreplace").splitlines()
        if shown:
            yield from (b"", b"gradwire run: %s of rank %d:" % (what.encode(), first.rank), *shown, b"")
    lines = []
    if shutdown.exit_code:
        lines += [
            f"on rank {error.rank} the thread {error.thread!r} ended with {error.name}: {error.text}"
            for error in threads
        ]
        lines += [text] if text else []
        if first is not None and shutdown.lost is not None:
            lines.append(shutdown.lost)
    lines += [
        f"rank {rank} (process {pids[rank]}) is still running, even after SIGKILL" for rank in sorted(shutdown.running)
    ]
    yield from (f"gradwire run: {line}".encode(errors="backslashreplace") for line in lines)

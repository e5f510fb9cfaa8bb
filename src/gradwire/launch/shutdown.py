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

Note [Who is named]
Some errors are raised by ranks that did nothing wrong, such as a timeout by all but the missing rank. A RankError contains the
ranks it is about. If one of them has failed too, its failure is shown; the last line of a run is about them, and does not blame
the rank that raised the error.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome
from gradwire.runtime.rank_error import NEAR, RankError, name_ranks, root_cause

LAST_LIMIT = 10.0
"""Seconds after SIGKILL after which the launcher stops waiting: a process may be in an uninterruptible sleep forever."""

_ENDING_SOON = frozenset({signal.SIGTERM, signal.SIGHUP})
STOPPING = _ENDING_SOON | {signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE}

Send = tuple[signal.Signals, tuple[int, ...]]
_OURS = (-signal.SIGTERM, -signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended."""

    rank: int
    status: int
    """Its exit code, or the negative number of the signal that killed it."""
    after: float
    stopped: bool = False
    """Whether the launcher had sent it a signal to end before it failed."""
    error: RankError | None = None
    """The exception that ended it; its time is in seconds since the start. None after os._exit, a signal or a crash."""

    @property
    def failed(self) -> bool:
        """Whether it failed, without having been stopped."""
        return self.status != 0 and not self.stopped

    @property
    def failed_after(self) -> float:
        """Seconds from the start to its failure: it may take a while to exit after an exception."""
        return self.after if self.error is None else min(self.after, self.error.time)

    @property
    def consequence(self) -> int:
        return 0 if self.error is None else self.error.consequence

    @property
    def while_starting(self) -> bool:
        """Whether the rank was interrupted before or while it imported modules or joined its world."""
        if self.error is None:
            return self.status == -signal.SIGINT
        return self.error.name == KeyboardInterrupt.__name__ and self.error.starting

    @property
    def own_status(self) -> int:
        """The status; 1 after an exception, if the launcher killed the rank while it exited."""
        return 1 if self.error is not None and not self.stopped and self.status in _OURS else self.status

    @property
    def exit_code(self) -> int:
        return self.own_status if self.own_status >= 0 else 128 - self.own_status

    def __str__(self) -> str:
        return described(self.own_status, self.after)


def described(status: int, after: float) -> str:
    """A description of how a process ended: `status` is its exit code, or the negative number of a signal.

    >>> described(-9, 3.21)
    'killed by SIGKILL, after 3.2 s'
    """
    how = f"exit code {status}" if status >= 0 else f"killed by {_name(-status)}"
    return f"{how}, after {after:.1f} s"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


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
        self._stop_at = self._kill_at = self._give_up_at = math.inf
        self._told_at = math.inf
        """When ranks were sent the first signal to end."""

    def ended(self, ending: Ending) -> None:
        self.running.discard(ending.rank)
        told = self._told_at < math.inf and (ending.error is None or ending.error.time >= self._told_at)
        ending = replace(ending, stopped=told or (self._is_ending and ending.status != 0))
        self.endings.append(ending)
        if ending.failed:
            self._stop_at = min(self._stop_at, ending.after + (NEAR if ending.consequence else 0.0))
        elif ending.status != 0 and self._told_at == math.inf:
            self._kill_at = min(self._kill_at, ending.after + self._grace)
            if ending.while_starting:
                self._stop_at = min(self._stop_at, ending.after + NEAR)

    def signalled(self, number: signal.Signals, now: float) -> None:
        """The launcher has received a signal and forwarded it."""
        if number in STOPPING and self._stop_at == math.inf:
            self.stopped_by = self.stopped_by or number
        if number in _ENDING_SOON:
            self._kill_at = min(self._kill_at, now + self._grace)

    def lose(self, what: str, now: float, *, output: bool = False) -> None:
        """The ranks or their output need something that is no longer there: stop them as after a failure.

        The exit code is not 0 if their `output` is lost, even if they end well.
        """
        self._output_lost |= output
        if self.first is None or self.first.consequence:
            self.lost = self.lost or what
        self._stop_at = min(self._stop_at, now)

    @property
    def has_begun(self) -> bool:
        """Whether the ranks have been, or will be, told to end."""
        return self._is_ending or self._stop_at < math.inf

    @property
    def _is_ending(self) -> bool:
        """Whether the run is already ending, so that further failures are consequences."""
        return self.stopped_by is not None or self.lost is not None

    def kill(self, now: float) -> None:
        self._kill_at = now

    def abandon(self, number: signal.Signals, now: float) -> None:
        """The run has become pointless, as when the reader of its output is gone: stop it as after a failure."""
        self.signalled(number, now)
        self._stop_at = min(self._stop_at, now)

    def due(self, now: float) -> Iterable[Send]:
        ranks = tuple(sorted(self.running))
        if now >= self._stop_at and self._told_at == math.inf:
            self._told_at = now
            self._kill_at = min(self._kill_at, now + self._grace)
            yield signal.SIGTERM, ranks
        if now >= self._kill_at and self._give_up_at == math.inf:
            self._told_at = min(self._told_at, now)
            self._give_up_at = now + LAST_LIMIT
            yield signal.SIGKILL, ranks

    @property
    def next_time(self) -> float:
        """When `due` should be called again if nothing happens before; infinity if never."""
        if self._give_up_at < math.inf:
            return self._give_up_at
        return self._kill_at if self._told_at < math.inf else min(self._stop_at, self._kill_at)

    def is_over(self, now: float) -> bool:
        """Whether all ranks have ended, or the remaining ones cannot be killed."""
        return not self.running or now >= self._give_up_at

    @property
    def first(self) -> Ending | None:
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


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The failure that caused the others: see `rank_error.py`, and Note [Who is named]."""
    failures = {ending.rank: ending for ending in sorted(endings, key=lambda e: e.rank) if ending.failed}
    first = root_cause(failures.values(), when=lambda e: e.failed_after, consequence=lambda e: e.consequence)
    found, seen = first, set[int]()
    while found is not None and found.error is not None and found.rank not in found.error.culprits:
        if found.rank in seen:
            return first  # ranks that blame each other
        seen.add(found.rank)
        named = [failures[rank] for rank in found.error.culprits if rank in failures]
        if not named:
            break
        found = min(named, key=lambda e: e.failed_after)
    return found


def summary(first: Ending, endings: Iterable[Ending]) -> str:
    """One line about the failure and about what happened to the other ranks.

    >>> summary(Ending(2, 1, 3.21), [Ending(r, -15, 3.3, stopped=True) for r in (0, 1, 3)])
    'rank 2 failed first (exit code 1, after 3.2 s); ranks 0, 1, 3 were stopped'
    """
    others = [ending for ending in endings if ending.rank != first.rank]
    too = [e.rank for e in others if e.failed or _failed_alike(e, first)]
    finished = [e.rank for e in others if not e.stopped and not e.failed]
    about = first.error.culprits if first.error is not None and first.consequence == 2 else ()
    early = [rank for rank in finished if rank in about]  # it was lost because it had nothing more to do
    if first.error is None or not first.error.summary:
        parts = [f"rank {first.rank} failed {'first ' if others else ''}({first})"]
    else:
        what = name_ranks(early, "finished early with exit code 0") if early else first.error.summary
        parts = [f"{what} ({first.error.name} on rank {first.rank}, {first})"]
    for one, several, ranks in (
        ("was stopped", "were stopped", [e.rank for e in others if e.stopped and e.rank not in too]),
        ("failed too", "failed too", too),
        ("had finished", "had finished", [rank for rank in finished if rank not in early]),
    ):
        if ranks:
            parts.append(name_ranks(ranks, one, several))
    return "; ".join(parts)


def _failed_alike(ending: Ending, first: Ending) -> bool:
    """Whether a rank that was stopped has raised what `first` has raised: ranks agree on many errors, and some are slower."""
    if ending.status == 0 or ending.error is None or first.error is None:
        return False
    return (ending.error.module, ending.error.name) == (first.error.module, first.error.name)


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
        what, shown = "last output", [*tails[first.rank]]
        if first.error is not None:
            what, shown = "traceback", first.error.traceback.encode(errors="backslashreplace").splitlines()
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

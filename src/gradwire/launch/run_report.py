"""What the launcher saves and writes when a run has ended: the first failure, and what became of the other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from gradwire.launch.first_failure import summary
from gradwire.launch.shutdown import Shutdown
from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome
from gradwire.runtime.rank_error import RankError


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
    signal = None if stopped_by is None or not shutdown.exit_code else stopped_by.name
    return RunOutcome(text, None if first is None else first.rank, signal, tuple(ranks), time.time())


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

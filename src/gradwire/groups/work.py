"""`Work`: one submitted collective.

A group makes a Work with `Group.begin(op)` and settles it exactly once, from any thread, with `finish()` or `fail(error)`;
the first call wins. Callers wait. This module is independent of engines: a Work whose engine can be waited on directly
(a CUDA stream, a gloo operation) is a subclass in that engine's module.

Note [Settled by one step]
`abort()` may be called in a signal handler, which interrupts the main thread between any two instructions, even inside `finish` of
the same Work. A lock would then never be released. So the outcome is decided by one atomic step: the first call that appends to the
list of outcomes settles the Work. Nothing in `fail` takes a lock that the interrupted code may hold.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.timeouts import wait_seconds
from gradwire.errors import CollectiveTimeout, PeerLost, UsageError, again
from gradwire.events import is_kept
from gradwire.groups.completion import OutcomeFuture, WorkInfo
from gradwire.groups.forked import refuse_in_child
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind

_LONG = 5.0
"""A caller's own wait that failed after so many seconds deserves a report, which may take one. A loop of short waits does not."""


def seconds(timeout: float | timedelta | None) -> float | None:
    """A timeout as torch users pass it (seconds, timedelta, or a zero timedelta for "none given"), in seconds."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        value = timeout.total_seconds()
        return None if value <= 0 else value
    return wait_seconds("wait", timeout)


class Work:
    """One operation in flight. It may be waited on at any time, any number of times and from any thread: each wait returns True, or
    raises the error that the operation failed with. A wait whose own `timeout` passes raises CollectiveTimeout only to that caller
    and leaves the operation running; when the operation's deadline passes, the operation itself fails."""

    place = 0
    """How many collectives the rank had joined including this one, if the group counts them."""
    ordinal = 0
    """The number of the collective, the same on all ranks: see `Ledger.next_ordinal`."""
    profiled: Any = None
    """The range that torch's profiler shows for it, while one is on."""
    waited_for = False
    """Whether it is on record that a caller waits, or has waited, for it."""

    def __init__(self, op: Collective, ledger: Any, *, seq: int, timeout: float) -> None:
        """`ledger` is that of the group, a `Ledger`, whose module imports this one."""
        self.op = op
        self.seq = seq
        self.ledger = ledger
        self.timeout = timeout
        self.started = time.perf_counter()
        self.finished: float | None = None
        self.source: int | None = op.peer if op.kind is OpKind.RECV else None
        """The sender of a receive, if known: see `source_rank`."""
        self._error: BaseException | None = None
        self.settled = False
        """Whether `finish` or `fail` was called. Does not query the engine: see `is_completed`."""
        self._outcomes: list[list[BaseException | None]] = []  # see Note [Settled by one step]
        self._latch = threading.Lock()
        self._latch.acquire()
        self.group: object = None
        """The group, while the operation is in flight, so that a caller who keeps only the Work can wait for it."""
        self._future: OutcomeFuture | None = None
        self._callbacks: deque[Callable[[Work], None]] = deque()

    @classmethod
    def over(cls, op: Collective, ledger: Any, *, started: float, timeout: float) -> Work:
        """The Work of an operation that was complete before its Work existed, with no deadline, hook or listener to serve."""
        work = cls(op, ledger, seq=ledger.next_seq(), timeout=timeout)
        work.ordinal = ledger.next_ordinal(op)
        work.started, work.finished = started, time.perf_counter()
        work._outcomes.append([None])
        work.settled = True
        work._latch.release()
        if writer.active is not None:
            ledger.record(RecordKind.COLLECTIVE_FINISHED, work, work.finished)
        return work

    def finish(self, *, source_rank: int | None = None) -> bool:
        """Mark it finished: the outputs hold the result. False if it was already settled."""
        return self._settle([None], source_rank)

    def fail(self, error: BaseException) -> bool:
        """Mark it failed with `error`. False if it was already settled."""
        return self._settle([error], None)

    def _settle(self, outcome: list[BaseException | None], source_rank: int | None) -> bool:
        """End it with `outcome`, an error or None in a list, unless another outcome was the first."""
        self._outcomes.append(outcome)
        if self._outcomes[0] is not outcome:
            return False
        self._error = error = outcome[0]
        if source_rank is not None:
            self.source = source_rank
        self.finished = time.perf_counter()
        self.settled = True
        # Listeners and hooks are called before any waiter wakes: once wait() has returned, the event has been emitted.
        try:
            self.ledger.settled(self)
        finally:  # Ctrl-C may interrupt a listener
            group, self.group = self.group, None
            self._latch.release()
            if self._future is not None:
                self.ledger.futures.put(self._future, error, self.op.outputs)
            _call_back(self, self._callbacks)
        del group  # perhaps the last reference, which ends the group's threads: so this comes last
        return True

    def limit(self, timeout: float) -> None:
        """Shorten the deadline to `timeout` seconds after submission."""
        self.timeout = min(self.timeout, timeout)

    @property
    def deadline(self) -> float:
        """When the operation times out, on `time.perf_counter`'s clock."""
        return self.started + self.timeout

    def add_done_callback(self, fn: Callable[[Work], None]) -> None:
        """Call `fn(work)` once settled: now if it already is, else in the thread that settles it. `fn` must not block."""
        if self.settled:
            fn(self)
            return
        self._callbacks.append(fn)
        if self.settled:  # in the meantime, perhaps without calling `fn`
            _call_back(self, self._callbacks)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Return True once the outputs may be used; raise the operation's error if it failed. If a completion hook has raised, the
        wait for a successful operation raises HookError, once, with the outputs in place."""
        self.wait_done(timeout)
        if self.ledger.hook_errors:
            self.ledger.raise_hook_error()
        return True

    def wait_done(self, timeout: float | timedelta | None = None) -> bool:
        """Like `wait`, without the errors of completion hooks: for a group that takes several steps and must not stop halfway."""
        if not self.settled:
            refuse_in_child(self.ledger.pid, "wait for", self.op)
            self.ledger.waited(self)
        limit = seconds(timeout)
        remaining = max(0.0, self.deadline - time.perf_counter())
        if limit is None or limit >= remaining:
            if not self.wait_settled(remaining):
                self.ledger.expire(self)
        elif not self.wait_settled(limit):
            late: CollectiveTimeout = self.ledger.timed_out(self, limit)
            if limit >= _LONG:
                writer.add_report(late)
            raise late
        # Not _error, which the settling thread may not have set yet. A stream-ordered wait returns before the Work is settled.
        error = self._outcomes[0][0] if self._outcomes else None
        if error is not None:
            if isinstance(error, CollectiveTimeout | PeerLost):
                writer.add_report(error)
            raise again(error)
        return True

    def wait_settled(self, limit: float) -> bool:
        """Wait at most `limit` seconds until it has finished or failed; True if it has."""
        if not self._latch.acquire(timeout=max(0.0, min(limit, threading.TIMEOUT_MAX))):
            return self.settled
        self._latch.release()
        return True

    def is_completed(self) -> bool:
        return self.settled

    def is_success(self) -> bool:
        """Whether it has finished and the outputs hold the result."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error it failed with; None while it runs and after success."""
        return self._error

    def result(self) -> list[Tensor]:
        self.wait()
        return list(self.op.outputs)

    def source_rank(self) -> int:
        """The sender of a finished receive."""
        if self.source is None:
            raise UsageError(
                f"source_rank of {self.op}: not known. Only a receive has a source, and one from any rank only once finished."
            )
        return self.source

    @property
    def duration(self) -> float | None:
        """Seconds from submission to completion; None while it runs."""
        return None if self.finished is None else self.finished - self.started

    @property
    def info(self) -> WorkInfo:
        """What completion hooks receive; while it runs, `finished` is the current time."""
        finished = time.perf_counter() if self.finished is None else self.finished
        what = self.op.signature, self.ledger.name, self.ledger.rank, self.seq
        return WorkInfo(*what, self.op.nbytes, self.started, finished, self._error)

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch Future of the list of outputs; on CUDA it preserves stream order."""
        if not self.settled:
            refuse_in_child(self.ledger.pid, "get_future of", self.op)
            self.ledger.waited(self)  # or will: a wait for a torch Future in C++, as in torch's DDP, cannot be seen
        with self.ledger.futures.lock:
            if self._future is None:
                self._future = self.ledger.futures.new_future(self.op.device, self.ledger.events.errors)
            future = self._future
        if self.settled:
            future.complete(self._error, self.op.outputs)
        return future.torch_future

    def __repr__(self) -> str:
        if not self.settled:
            state = f"in flight for {time.perf_counter() - self.started:.3f} s"
        elif self._error is None:
            state = f"finished in {self.duration or 0:.6f} s"
        else:
            state = f"failed: {type(self._error).__name__}"
        where = f"rank {self.ledger.rank} of {self.ledger.name}"
        return f"<{type(self).__name__} #{self.seq} {self.op} on {where}: {state}>"


def settle_together(works: Sequence[tuple[Work, int | None]], error: BaseException | None) -> None:
    """Settle one operation of several ranks of this process, each with its source rank. The outcome of all is fixed before any of
    them can abort the group: what all ranks have completed must not fail on some."""
    outcome = [error]
    for work, _ in works:
        work._outcomes.append(outcome)
    for work, source_rank in works:
        work._settle(outcome, source_rank)


def _call_back(work: Work, callbacks: deque[Callable[[Work], None]]) -> None:
    while True:
        try:
            callback = callbacks.popleft()
        except IndexError:
            return
        # The settling thread may have other ranks' operations to settle next: a callback must not stop it.
        try:
            callback(work)
        except BaseException as problem:
            if not is_kept(problem):
                _call_back(work, callbacks)
                raise
            work.ledger.events.errors.append(problem)

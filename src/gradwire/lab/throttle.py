"""`Throttled`: a group that takes as long as over a slow link, on ranks of any kind. Only the completion is delayed.

Note [The link]
Each rank has one link to the others, with a rate and a latency. An operation that the inner group has finished is put on the
link: its bytes follow those of the previous operation, and arrive one latency after the last of them was sent,

    sent    = max(now, when the link is free) + bytes / rate
    arrived = sent + latency

so two operations in flight share the rate but not the latency, like packets on a wire. The bytes are those that the best algorithm
makes a rank send (`collectives.op.sent_bytes`), or receive if it only receives. The inner group's time is added, so use a fast one.
Groups made by `split` use the same link. Slow start, loss and headers are not modeled: `hosts(n, mbit=...)` has all of them.
Each operation on the link has its own thread, since callbacks of its future may start another operation and wait for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.op import sent_bytes
from gradwire.errors import CollectiveTimeout, UsageError
from gradwire.groups.base import Group
from gradwire.groups.forked import finalize_here
from gradwire.groups.work import Work
from gradwire.groups.wrappers import TrackedWrapper

_LOOK_EVERY = 0.1
"""Seconds between checks for a failure of the inner group while bytes are on the link."""


class Link:
    """One rank's link: see Note [The link]. Thread-safe.

    >>> link = Link(mbit=8, latency_ms=50)
    >>> link.send(500_000, now=10.0), link.send(500_000, now=10.2), link.sent_bytes
    (10.55, 11.05, 1000000.0)
    >>> with link.unlimited():
    ...     link.send(500_000, now=12.0)
    12.0
    """

    def __init__(self, *, mbit: float, latency_ms: float) -> None:
        self.mbit = mbit
        self.latency_ms = latency_ms
        self.sent_bytes = 0.0
        """All bytes that have been put on it so far."""
        self._free = 0.0
        self._lock = threading.Lock()

    def send(self, nbytes: float, *, now: float) -> float:
        """Put bytes on the link and return when they will have arrived."""
        with self._lock:
            self.sent_bytes += nbytes
            self._free = max(now, self._free) + nbytes * 8e-6 / self.mbit
            return self._free + self.latency_ms * 1e-3

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Let everything arrive at once for as long as the context is open; on all ranks together."""
        limits = self.mbit, self.latency_ms
        self.mbit, self.latency_ms = math.inf, 0.0
        try:
            yield
        finally:
            self.mbit, self.latency_ms = limits


class Throttled(TrackedWrapper):
    """A group whose operations take as long as over a link of `mbit` megabits per second and `latency_ms`: see Note [The link].
    Wrap the group on every rank, with the same arguments.

    >>> import torch
    >>> from gradwire.groups import ThreadGroup
    >>> a, b = (Throttled(group, mbit=8, latency_ms=5) for group in ThreadGroup.world(2))
    >>> x, y = torch.ones(10_000), torch.ones(10_000)
    >>> work = a.all_reduce(x, async_op=True)
    >>> b.all_reduce(y).wait() and work.wait()
    True
    >>> work.duration >= 0.045  # 5 ms, and 40,000 bytes at a million bytes a second
    True
    >>> a.close(), b.close()
    (None, None)
    """

    def __init__(self, inner: Group, *, mbit: float, latency_ms: float = 0.0) -> None:
        if not 0 < mbit < float("inf") or not 0 <= latency_ms < float("inf"):
            raise UsageError(
                f"Throttled({inner}, mbit={mbit}, latency_ms={latency_ms}): the rate must be above 0 and the latency 0 or more, "
                "both finite. Omit the wrapper for a group without a limit."
            )
        super().__init__(inner)
        self.link = Link(mbit=mbit, latency_ms=latency_ms)
        self._threads: set[threading.Thread] = set()
        self._threads_finalizer = finalize_here(self, _join, self._threads, 2.0)

    @property
    def sent_bytes(self) -> float:
        """The bytes that this rank has put on its link, over all operations and parts of the group."""
        return self.link.sent_bytes

    def rewrap(self, inner: Group) -> Group:
        """A part of the group, on the same link."""
        part = Throttled(inner, mbit=self.link.mbit, latency_ms=self.link.latency_ms)
        part.link = self.link
        return part

    def submit(self, op: Collective) -> Work:
        """Submit to the inner group, and settle the Work when the bytes would have arrived."""
        with self._order:
            work = self.begin(op)
            if work.is_completed():  # aborted in the meantime
                return work
            try:
                step = self.steps[work.seq] = self.inner.submit(op.within(work.timeout))
            except Exception as error:
                work.fail(error)
                return work
        over = threading.Event()

        def settled(_: Work) -> None:
            self.steps.pop(work.seq, None)
            over.set()

        work.add_done_callback(settled)
        step.add_done_callback(lambda _: self._arrive(work, step, over))
        return work

    def _arrive(self, work: Work, step: Work, over: threading.Event) -> None:
        """The inner group has finished it. Called in the inner group's thread, so this must not block."""
        error = step.exception()
        if isinstance(error, CollectiveTimeout):
            work.fail(self.late(work, error))
        elif error is not None:
            work.fail(error)
        elif not work.is_completed():
            now = time.perf_counter()
            work.ledger.started(work, now)
            arrival = self.link.send(crossing_bytes(work.op, self.rank, self.size), now=now)
            name, args = f"gradwire-link-{self.name}-{self.rank}", (work, step, arrival, over, self.inner)
            thread = threading.Thread(target=_deliver, args=args, name=name, daemon=True)
            thread.start()
            self._threads.add(thread)
            self._threads.difference_update([other for other in list(self._threads) if not other.is_alive()])

    def recover(self, timeout: float | None = None) -> None:
        """Recover the inner group. What was on the link is lost."""
        super().recover(timeout)
        self.link._free = 0.0

    def _release(self) -> None:
        super()._release()
        self._threads_finalizer()


def _deliver(work: Work, step: Work, arrival: float, over: threading.Event, inner: Group) -> None:
    """Wait until an operation arrives, then settle it. `over` is set when it was abandoned."""
    while (left := arrival - time.perf_counter()) > 0 and not over.wait(min(left, _LOOK_EVERY)):
        if inner.failure is not None:  # another rank has failed: the inner group has nothing in flight to fail here
            work.fail(inner.failure)
    work.finish(source_rank=step.source)


def _join(threads: set[threading.Thread], timeout: float) -> None:
    """Wait until all threads have ended. They end early if their operations are abandoned."""
    deadline = time.perf_counter() + timeout
    for thread in list(threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.perf_counter()))


def crossing_bytes(op: Collective, rank: int, size: int) -> float:
    """The bytes that cross a rank's link in `op`, in the direction in which more do.

    >>> import torch
    >>> from gradwire.collectives import recv
    >>> crossing_bytes(recv(torch.zeros(10), src=1), rank=0, size=2)
    40
    """
    if op.kind is OpKind.RECV:
        return sum(t.nbytes for t in op.outputs)
    if op.kind is OpKind.GATHER and rank == op.root:
        return (size - 1) * sum(t.nbytes for t in op.inputs)
    if op.kind is OpKind.SCATTER and rank != op.root:
        return sum(t.nbytes for t in op.outputs)
    return sent_bytes(op, rank, size)

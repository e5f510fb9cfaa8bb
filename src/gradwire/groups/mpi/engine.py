"""`Engine`: one communicator at work. Posts operations, notices when they are over, and hears from the other ranks.

Note [Who makes progress]
MPI moves bytes only while somebody calls it. A caller that waits tests its own requests, which moves everybody's; so a
synchronous operation wakes no other thread. What nobody waits for, as the buckets of a backward that still runs, is the
engine's thread's. It is not woken by a submit, which would hand the interpreter lock back and forth for every small operation;
it looks by itself, every tenth of a millisecond while something young is in flight, seldom otherwise, and ends when nothing
has been in flight for a while. It starts and ends as the watchdog does (see Note [Starting and ending without a lost
operation] in groups/watchdog.py).

Note [Who has joined]
A rank tells the others how many collectives it has joined when one of them asks, when an operation of its own has been in
flight for long, and before its thread goes to rest. So nothing is sent for operations that finish at once, and whoever waits
for a rank that will not come has heard from all that did.

Note [Leaving]
A rank that closes its group tells all others, as its last message: how many collectives it had joined, and whether anything was
left over. A communicator is freed when everybody has said so, all had joined the same collectives and nobody had anything
left; then no message of it can be on its way. Otherwise it is kept (see Note [What never completes] in runtime.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gradwire.collectives import Collective, OpKind
from gradwire.groups.mpi.flight import Flight
from gradwire.groups.mpi.inbox import Inbox
from gradwire.groups.mpi.mail import Mailbox, Message
from gradwire.groups.mpi.native import Native
from gradwire.groups.mpi.runtime import Comm, Runtime

_BUSY, _PATIENT, _RESTING = 0.0001, 0.005, 0.001
"""Seconds between looks: with young operations in flight, with old ones only, with none."""
_OLD = 1.0
"""Seconds after which an operation is old: it waits for a rank, not for MPI."""
_REST = 1.0
"""Seconds without an operation after which the thread ends."""
_SPIN = 0.0002
"""Seconds that a waiter asks MPI without a pause."""
_LONGEST_PAUSE = 0.0005
_SUSPICIOUS_AGE = 0.3
"""An operation this old is looked into."""
_ASK_PATIENCE, _ASK_AGAIN = 0.1, 0.5
"""Seconds that answers may take; seconds until the same is asked again."""


@dataclass(slots=True)
class Peer:
    """What is known of another rank."""

    joined: int = 0
    told: int = 0
    """What it was last told of us."""
    left: float | None = None
    """When it said that it leaves."""
    clean: bool = True


class Engine:
    """A rank's half of a communicator. Knows flights and peers, no Work and no group."""

    def __init__(
        self, runtime: Runtime, native: Native, comm: Comm, spare: Comm, *, name: str, on_news: Callable[[], None]
    ) -> None:
        self.runtime = runtime
        self.comm = comm
        self.spare = spare
        """A second communicator, idle: where the ranks of a broken group meet."""
        self.rank: int = comm.rank
        self.joined = 0
        self.over = False
        """Whether no operation is begun any more."""
        self.clean = True
        """Whether all ranks' messages have met, as far as this rank knows."""
        self.aborted: tuple[int, str] | None = None
        """Which rank has aborted, and why."""
        self.peers = {r: Peer() for r in range(comm.size) if r != self.rank}
        self.flights: dict[int, Flight] = {}
        self._mpi = runtime.mpi
        self._native = native
        self._name = name
        self._on_news = on_news
        self._news = False
        self._waiters: set[int] = set()
        self._asked = 0.0
        self._answered: set[int] = set()
        self._running = False
        self._gone = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        with runtime.lock:
            self._mail = Mailbox(self._mpi, comm, native.tag_limit + 2)
            self._inbox = Inbox(self._mpi, comm)

    # -- operations ----------------------------------------------------------------------------------------------------

    def post(self, op: Collective, on_done: Callable[[Flight], None] | None = None) -> Flight | None:
        """Begin `op`, which MPI takes; `on_done` is called in the thread that finds it over. None if the engine has ended."""
        with self.runtime.lock:
            if self._gone:
                return None
            flight = Flight(self._inbox, op, cancelable=op.kind is OpKind.RECV)
            try:
                self._native.post(flight, op)
            except BaseException:
                self._abandon(flight)
                raise
            flight.on_done = on_done
            self.flights[id(flight)] = flight
        if not self._running:
            self._wake()
        return flight

    def _abandon(self, flight: Flight) -> None:
        """It was begun in part. What MPI has heard of may still read and write."""
        flight.take_back()
        if flight.requests:
            self.clean = False
            self.runtime.remains.flights.append(flight)

    def _ended(self, flight: Flight) -> None:
        """Under the lock: it is over. See Note [Memory outlives the requests] in flight.py."""
        del self.flights[id(flight)]
        if flight.error is not None:
            self.runtime.remains.retired.append(flight)

    def poll(self, flight: Flight) -> bool:
        """Look whether it is over, if nobody else is looking."""
        if flight.done or not self.runtime.lock.acquire(blocking=False):
            return flight.done
        try:
            mine = not flight.done and flight.test(self._mpi)
            if mine:
                self._ended(flight)
        finally:
            self.runtime.lock.release()
        if mine:
            flight.land()
        return flight.done

    def wait(self, flight: Flight, until: float, given_up: Callable[[], bool]) -> bool:
        """Look until it is over, `given_up` or the time `until` has come. Whether it is over."""
        me = threading.get_ident()
        self._waiters.add(me)
        try:
            spun, pause = time.perf_counter() + _SPIN, _LONGEST_PAUSE / 32
            while not self.poll(flight) and not given_up():
                now = time.perf_counter()
                if now >= until:
                    return False
                if now < spun:
                    os.sched_yield()
                else:
                    time.sleep(pause)
                    pause = min(_LONGEST_PAUSE, 2 * pause)
        finally:
            self._waiters.discard(me)
        return flight.done

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._starting:
            if not self._running and not self._gone:
                self._running = True
                self._thread = threading.Thread(target=self._run, name=f"gradwire-mpi-{self._name}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """See Note [Who makes progress]."""
        active = looked = time.perf_counter()
        while not self._gone:
            self.turn()
            now = time.perf_counter()
            flights = list(self.flights.values())
            if flights:
                active = now
                if now - looked > _SUSPICIOUS_AGE / 3:
                    looked = now
                    self._look_into(flights)
            young = any(now - flight.posted < _OLD for flight in flights)
            time.sleep(_RESTING if not flights or self._waiters else _BUSY if young else _PATIENT)
            if now - active > _REST:
                self._tell()
                self._running = False
                if not self.flights:
                    return
                with self._starting:
                    if self._running:
                        return
                    self._running = True

    def turn(self) -> None:
        """Settle what is over and read the mail, unless another thread is in MPI just now."""
        if not self.runtime.lock.acquire(blocking=False):
            return
        try:
            done = [flight for flight in list(self.flights.values()) if flight.test(self._mpi)]
            for flight in done:
                self._ended(flight)
            self._read(self._mail.receive())
        finally:
            self.runtime.lock.release()
        for flight in done:
            flight.land()
        if self._news:
            self._news = False
            self._on_news()

    def _look_into(self, flights: Iterable[Flight]) -> None:
        if any(flight.age > _SUSPICIOUS_AGE for flight in flights) and not self.over:
            self._tell()
            self._on_news()

    # -- the others ----------------------------------------------------------------------------------------------------

    def _read(self, mail: Iterable[tuple[int, Message]]) -> None:
        for rank, message in mail:
            peer = self.peers[rank]
            peer.joined = max(peer.joined, message["joined"])
            self._answered.add(rank)
            if "left" in message:
                peer.left, peer.clean, self._news = time.perf_counter(), message["clean"], True
            if "reason" in message and self.aborted is None:
                self.aborted, self._news = (rank, message["reason"]), True
            if "ask" in message and not self._gone:
                self._mail.send(rank, joined=self.joined)
                peer.told = self.joined

    def _tell(self) -> None:
        """Tell all peers how many collectives this rank has joined, if they do not know."""
        with self.runtime.lock:
            for rank, peer in self.peers.items():
                if peer.told != self.joined and peer.left is None and not self._gone:
                    peer.told = self.joined
                    self._mail.send(rank, joined=self.joined)

    def ask(self, place: int) -> None:
        """Ask those who are not known to have joined collective `place`, and give them a moment to answer."""
        if time.perf_counter() - self._asked < _ASK_AGAIN or self._gone:
            return
        self._asked = time.perf_counter()
        with self.runtime.lock:
            unsure = {rank for rank, peer in self.peers.items() if peer.joined < place and peer.left is None}
            self._answered -= unsure
            for rank in unsure:
                self._mail.send(rank, joined=self.joined, ask=True)
                self.peers[rank].told = self.joined
        while not unsure <= self._answered and time.perf_counter() - self._asked < _ASK_PATIENCE:
            self.turn()
            time.sleep(_LONGEST_PAUSE)

    def shout(self, reason: str) -> None:
        """Tell all peers that this rank has aborted. Never waits for them."""
        with self.runtime.lock:
            for rank, peer in self.peers.items():
                if peer.left is None and not self._gone:
                    self._mail.send(rank, joined=self.joined, reason=reason)

    # -- the end -------------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tell the peers, end the thread, and hand over to the runtime what is still in flight."""
        stuck = self._stop()
        if stuck is None:
            return
        with self.runtime.lock:
            self.clean &= not stuck and self.aborted is None
            for rank in self.peers:
                self._mail.send(rank, joined=self.joined, left=True, clean=self.clean)
        self.runtime.remains.departing.append(self)
        self.runtime.sweep()

    def retire(self) -> None:
        """End without a word: all ranks have gone on to another communicator. This one is never freed."""
        if self._stop() is not None:
            with self.runtime.lock:
                self._mail.close()
            self.runtime.remains.retired.append(self._mail)

    def _stop(self) -> list[Flight] | None:
        """End the thread; what never completed, or None if this was done before."""
        with self._starting:
            if self._gone:
                return None
            self._gone = self.over = True
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        with self.runtime.lock:
            flights = list(self.flights.values())
            self.flights.clear()
            stuck = [flight for flight in flights if not flight.cancel(self._mpi)]
        for flight in flights:
            flight.on_done = None
        self.runtime.remains.flights += stuck
        return stuck

    def settle_departure(self) -> bool:
        """Free the communicators if everybody has left. Whether there is nothing more to do. See Note [Leaving]."""
        with self.runtime.lock:
            self._read(self._mail.receive())
            if any(peer.left is None for peer in self.peers.values()) or not self._mail.sent:
                return False
            self._mail.close()
            if self.clean and all(peer.clean and peer.joined == self.joined for peer in self.peers.values()):
                self.comm.Free()
                self.spare.Free()
            return True


def tag_of(name: str, limit: int) -> int:
    """A tag that all ranks derive from a group's name."""
    value: Any = 0
    for byte in name.encode():
        value = (value * 131 + byte) % limit
    return int(value)

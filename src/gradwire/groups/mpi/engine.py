"""`MpiEngine`: one communicator at work. Posts operations, tests whether they are over, and exchanges control messages.

Note [Which thread makes progress]
MPI moves bytes only while a thread calls it. A caller that waits tests its own requests, which moves all others too. The rest is
left to the engine's thread. A submit does not wake it, which would hand the interpreter lock back and forth; it polls, every tenth
of a millisecond while something young is in flight, less often otherwise, and ends when nothing has been in flight for a while. It
first sets `_running` to False and then checks what is in flight; `post` first registers and then checks: one sees the other.

Note [Which ranks have joined]
A rank sends the others the number of collectives it has joined when one of them asks, when an operation of its own has been in
flight for long, and before its thread ends. So nothing is sent for operations that finish at once.

Note [Leaving]
A rank that closes its group sends all others a last message: how many collectives it had joined, and whether anything was left
over. A communicator is freed when every rank has sent it, all had joined the same collectives and none had anything left; then no
message of it can be under way. Otherwise it is kept (see Note [What never completes] in runtime.py).
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradwire.collectives import Collective
from gradwire.groups.mpi.native import Native
from gradwire.groups.mpi.pending_requests import PendingRequests, ReceiveMatcher
from gradwire.groups.mpi.runtime import Comm, Runtime

_BUSY, _PATIENT, _RESTING = 0.0001, 0.005, 0.001
"""Seconds between polls: with young operations in flight, with old ones only, with none."""
_OLD, _REST = 1.0, 1.0
"""Seconds after which an operation waits for a rank, not for MPI; seconds without an operation after which the thread ends."""
_SPIN = 0.0002
"""Seconds that a waiter tests without a pause."""
_LONGEST_PAUSE = 0.0005
_SUSPICIOUS_AGE = 0.3
"""At this age of an operation the group checks for lost ranks."""
_ASK_PATIENCE, _ASK_AGAIN = 0.1, 0.5
"""Seconds that answers may take; seconds until the same is asked again."""
_LONGEST = 256
"""Characters of text in a control message: so few that MPI sends it whole, and to receive it takes no time."""


@dataclass(slots=True)
class Peer:
    """What is known of another rank."""

    joined: int = 0
    sent: int = 0
    """How many collectives we have last sent it as joined."""
    left: float | None = None
    """When its message that it leaves arrived."""
    clean: bool = True


class MpiEngine:
    """A rank's half of a communicator. Knows requests and peers, no Work and no group."""

    def __init__(
        self, runtime: Runtime, native: Native, comm: Comm, spare: Comm, *, name: str, on_change: Callable[[], None]
    ) -> None:
        self.runtime = runtime
        self.comm = comm
        self.spare = spare
        """A second communicator, idle: where the ranks of a broken group meet."""
        self.rank: int = comm.rank
        self.joined = 0
        self.ended = False
        """Whether no operation is begun any more."""
        self.clean = True
        """Whether all ranks' messages have met, as far as this rank knows."""
        self.aborted: str | None = None
        """Which rank has aborted, and why."""
        self.peers = {r: Peer() for r in range(comm.size) if r != self.rank}
        self.pending: dict[int, PendingRequests] = {}
        self._mpi = runtime.mpi
        self._native = native
        self._control_tag = native.tag_limit + 2
        self._unsent: list[tuple[Any, bytes]] = []
        """Control messages that are still being sent."""
        self._name = name
        self._on_change = on_change
        self._changed = False
        self._waiters: set[int] = set()
        self._asked = 0.0
        self._answered: set[int] = set()
        self._running = False
        self._stopped = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._matcher = ReceiveMatcher(self._mpi, comm)

    def post(self, op: Collective, on_done: Callable[[PendingRequests], None] | None = None) -> PendingRequests | None:
        """Begin `op`, which MPI takes; `on_done` is called in the thread that finds it over. None if the engine has ended."""
        with self.runtime.lock:
            if self._stopped:
                return None
            pending = PendingRequests(self._matcher, op)
            try:
                self._native.post(pending, op)
            except BaseException:  # it was begun in part: what was posted may still read and write
                pending.withdraw()
                if pending.requests:
                    self.clean = False
                    self.runtime.keep_alive.requests.append(pending)
                raise
            pending.on_done = on_done
            self.pending[id(pending)] = pending
        if not self._running:
            self._wake()
        return pending

    def _ended(self, pending: PendingRequests) -> None:
        """Under the lock: it is over. See Note [Memory outlives the requests] in pending_requests.py."""
        del self.pending[id(pending)]
        if pending.error is not None:
            self.runtime.keep_alive.memory.append(pending)

    def poll(self, pending: PendingRequests) -> bool:
        """Test whether it is over, unless another thread is testing."""
        if pending.done or not self.runtime.lock.acquire(blocking=False):
            return pending.done
        try:
            mine = not pending.done and pending.test(self._mpi)
            if mine:
                self._ended(pending)
        finally:
            self.runtime.lock.release()
        if mine:
            pending.notify()
        return pending.done

    def wait(self, pending: PendingRequests, until: float, given_up: Callable[[], bool]) -> bool:
        """Poll until it is over, until `given_up()`, or until the time `until`. True if it is over."""
        me = threading.get_ident()
        self._waiters.add(me)
        try:
            spun, pause = time.perf_counter() + _SPIN, _LONGEST_PAUSE / 32
            while not self.poll(pending) and not given_up():
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
        return pending.done

    def _wake(self) -> None:
        with self._starting:
            if not self._running and not self._stopped:
                self._running = True
                self._thread = threading.Thread(target=self._run, name=f"gradwire-mpi-{self._name}", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        """See Note [Which thread makes progress]."""
        active = looked = time.perf_counter()
        while not self._stopped:
            self.progress()
            now = time.perf_counter()
            all_pending = list(self.pending.values())
            if all_pending:
                active = now
                if now - looked > _SUSPICIOUS_AGE / 3:
                    looked = now
                    if any(now - pending.posted > _SUSPICIOUS_AGE for pending in all_pending) and not self.ended:
                        self._send_progress()
                        self._on_change()
            young = any(now - pending.posted < _OLD for pending in all_pending)
            time.sleep(_RESTING if not all_pending or self._waiters else _BUSY if young else _PATIENT)
            if now - active > _REST:
                self._send_progress()
                self._running = False
                if not self.pending:
                    return
                with self._starting:
                    if self._running:
                        return
                    self._running = True

    def progress(self) -> None:
        """Settle what is over and handle control messages, unless another thread is in MPI just now."""
        if not self.runtime.lock.acquire(blocking=False):
            return
        try:
            done = [pending for pending in list(self.pending.values()) if pending.test(self._mpi)]
            for pending in done:
                self._ended(pending)
            self._handle_messages()
        finally:
            self.runtime.lock.release()
        for pending in done:
            pending.notify()
        if self._changed:
            self._changed = False
            self._on_change()

    def _send(self, rank: int, **message: Any) -> None:
        """Send a control message, without waiting. Under the lock."""
        short = {key: value[:_LONGEST] if isinstance(value, str) else value for key, value in message.items()}
        data = json.dumps({"joined": self.joined, **short}).encode()
        request = self.comm.Isend([data, len(data), self._mpi.BYTE], dest=rank, tag=self._control_tag)
        if not request.Test():
            self._unsent.append((request, data))

    def _messages(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The control messages that have arrived: (source, message). Under the lock."""
        probe, status, byte = self.comm.Improbe, self._mpi.Status(), self._mpi.BYTE
        while (arrived := probe(source=self._mpi.ANY_SOURCE, tag=self._control_tag, status=status)) is not None:
            data, source = bytearray(status.Get_count(byte)), status.Get_source()
            arrived.Recv([data, byte])
            yield source, json.loads(data)
        for sending in list(self._unsent):  # in place: a signal handler may send in between
            if sending[0].Test():
                self._unsent.remove(sending)

    def _handle_messages(self) -> None:
        for rank, message in self._messages():
            peer = self.peers[rank]
            peer.joined = max(peer.joined, message["joined"])
            self._answered.add(rank)
            if "left" in message:
                peer.left, peer.clean, self._changed = time.perf_counter(), message["clean"], True
            if "reason" in message and self.aborted is None:
                self.aborted, self._changed = message["reason"], True
            if "ask" in message and not self._stopped:
                self._send(rank)
                peer.sent = self.joined

    def _send_progress(self) -> None:
        """Send all peers the number of collectives that this rank has joined, where it has changed."""
        with self.runtime.lock:
            for rank, peer in self.peers.items():
                if peer.sent != self.joined and peer.left is None and not self._stopped:
                    peer.sent = self.joined
                    self._send(rank)

    def ask(self, place: int) -> None:
        """Ask the ranks that are not known to have joined collective `place`, and give them a moment to answer."""
        if time.perf_counter() - self._asked < _ASK_AGAIN or self._stopped:
            return
        self._asked = time.perf_counter()
        with self.runtime.lock:
            unsure = {rank for rank, peer in self.peers.items() if peer.joined < place and peer.left is None}
            self._answered -= unsure
            for rank in unsure:
                self._send(rank, ask=True)
                self.peers[rank].sent = self.joined
        while not unsure <= self._answered and time.perf_counter() - self._asked < _ASK_PATIENCE:
            self.progress()
            time.sleep(_LONGEST_PAUSE)

    def send_abort(self, reason: str) -> None:
        """Notify all peers that this rank has aborted. Never waits for them."""
        with self.runtime.lock:
            for rank, peer in self.peers.items():
                if peer.left is None and not self._stopped:
                    self._send(rank, reason=reason)

    def leave(self) -> None:
        """Notify the peers, end the thread, and hand over to the runtime what is still in flight."""
        stuck = self._stop()
        if stuck is None:
            return
        with self.runtime.lock:
            self.clean &= not stuck and self.aborted is None
            for rank in self.peers:
                self._send(rank, left=True, clean=self.clean)
        self.runtime.keep_alive.departing.append(self)
        self.runtime.sweep()

    def retire(self) -> None:
        """End without a message: all ranks have gone on to another communicator. This one is never freed."""
        if self._stop() is not None:
            self.runtime.keep_alive.memory.append(self._unsent)

    def _stop(self) -> list[PendingRequests] | None:
        """End the thread; what never completed, or None if this was done before."""
        with self._starting:
            if self._stopped:
                return None
            self._stopped = self.ended = True
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(5.0)
        with self.runtime.lock:
            all_pending = list(self.pending.values())
            self.pending.clear()
            stuck = [pending for pending in all_pending if not pending.cancel(self._mpi)]
        for pending in all_pending:
            pending.on_done = None
        self.runtime.keep_alive.requests += stuck
        return stuck

    def settle_departure(self) -> bool:
        """Free the communicators if every rank has left. True if there is nothing more to do. See Note [Leaving]."""
        with self.runtime.lock:
            self._handle_messages()
            if any(peer.left is None for peer in self.peers.values()) or self._unsent:
                return False
            if self.clean and all(peer.clean and peer.joined == self.joined for peer in self.peers.values()):
                self.comm.Free()
                self.spare.Free()
            return True


def tag_of(name: str, limit: int) -> int:
    """A tag that all ranks derive from a group's name."""
    return zlib.crc32(name.encode()) % limit

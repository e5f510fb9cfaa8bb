"""`SharedMemoryGroup`: ranks are processes of one host, and an all-reduce of the group's own memory is one pass over it.

    group = SharedMemoryGroup(store, rank, size)
    bucket = group.allocate(1_000_000)       # in the heap that all ranks can reach
    group.all_reduce(bucket)                 # nothing is copied

The segment (`segment.py`) holds the board (`board.py`), message slots, staging buffers and one heap per rank (`heap.py`);
`programs.py` picks the program of a collective, `p2p.py` has sends and receives. `engine.py` drives both, `diagnosis.py` finds out
which rank is missing or has failed, `recovery.py` brings all ranks back into step, and `sync.py` argues why all that is right.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from gradwire.collectives import Collective, Scope
from gradwire.collectives.lower import is_identity
from gradwire.errors import ClosedError, GroupError, PeerLost, SharedMemoryFull, UsageError, again
from gradwire.groups.base import DEFAULT_TIMEOUT, Group
from gradwire.groups.forked import finalize_here
from gradwire.groups.ledger import Arrivals, profiler_enabled
from gradwire.groups.shared_memory.board import HERE, Board, SegmentPlan
from gradwire.groups.shared_memory.diagnosis import report
from gradwire.groups.shared_memory.engine import Engine
from gradwire.groups.shared_memory.heap import Heap
from gradwire.groups.shared_memory.liveness import Pulse
from gradwire.groups.shared_memory.p2p import Mailbox
from gradwire.groups.shared_memory.programs import Programs
from gradwire.groups.shared_memory.segment import Segment, Ticket, default_directory, warn_of_copies, warn_once
from gradwire.groups.shared_memory.sync import Futex, Polling, Sleep
from gradwire.groups.shared_memory.views import Views
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.groups.work import Work
from gradwire.recorder.source import derived_id
from gradwire.runtime.host import host_identity
from gradwire.runtime.threads import weakly

ROOM, ROOM_PER_RANK = 64 << 30, 16 << 30
"""Address space of a segment, in bytes, unless `room` is given: the larger of the two, the second for each rank.
Memory is taken only as the heaps grow."""

_SMALLEST_HEAP = 1 << 20
_WORLD = Scope.WORLD


class SharedMemoryGroup(Group):
    """Processes of one user on one host. `store` is where they meet; it is not used afterwards, but for sub-groups."""

    tells_mismatch = True
    identifies_itself = True

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        name: str | None = None,
        directory: str | None = None,
        room: int | None = None,
        waiting: Literal["auto", "futex", "polling"] = "auto",
    ) -> None:
        """`directory` is where the segment lies (a tmpfs; /dev/shm), `room` how many bytes it can
        become, for all ranks together. `waiting` names how ranks
        sleep, where the best way must not be used; it must be the same on all ranks."""
        super().__init__(rank, size, name=name or "shared-memory", timeout=timeout)
        self._store = store
        self._options: dict[str, Any] = {"directory": directory, "room": room, "waiting": waiting}
        room = max(ROOM, size * ROOM_PER_RANK) if room is None else room
        if not isinstance(room, int) or room > sys.maxsize:
            raise UsageError(
                f"{self}: room={room!r} is not a number of bytes that a file can have. Leave it out, or pass an int."
            )
        if room < SegmentPlan(size, 0).heaps + size * _SMALLEST_HEAP:
            raise UsageError(
                f"{self}: room={room} is not enough for {size} ranks. Leave it out, or give at least "
                f"{SegmentPlan(size, 0).heaps + size * _SMALLEST_HEAP} bytes."
            )
        if waiting not in ("auto", "futex", "polling"):
            raise UsageError(f"{self}: waiting={waiting!r} is unknown. Choose auto, futex or polling.")
        rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=self)
        with rendezvous.meeting(rendezvous.next_key("gradwire/shared-memory")):
            segment, plan = _meet(self, rendezvous, directory or default_directory(), room)
            try:
                self._board = Board(segment, plan, rank, _sleep(waiting, segment))
                self._heap = Heap(
                    segment.memory, plan.heap(rank), plan.heap(rank) + plan.heap_stride, _reserve(segment, rank)
                )
                self._board.pids[rank] = os.getpid()
                self._board.set_state(HERE)
                _wait_until_all_mapped(self._board, rendezvous)
                segment.unlink()
                self._views = Views(segment, plan, rank)
                programs = Programs(self.name, self._board, self._views)
                mailbox = Mailbox(segment, self._board, self._heap, self._views)
                pulse = Pulse(dict(enumerate(self._board.pids.tolist())))
            except BaseException:
                segment.close()
                raise
        self._segment = segment
        self._engine = Engine(self.name, self._board, programs, mailbox, pulse, weakly(self.fail))
        # After the base class's finalizer was made, so that at exit this one runs first.
        self._engine_finalizer = finalize_here(self, _stop, self._engine, segment)

    # -- the one verb --------------------------------------------------------------------------------------------------

    def submit(self, op: Collective) -> Work:
        """Queue it; the group's own thread carries it out."""
        work = self._put(op)
        if not work.is_completed():
            self._engine.wake()
        return work

    def submit_and_wait(self, op: Collective) -> Work:
        """Carry it out in this thread, unless another one is driving the group."""
        engine, ledger = self._engine, self.ledger
        # A plain sum can be wrong for this group in its scope only, and nothing may be signaled before that is checked.
        watched = ledger.events or ledger.hooks or profiler_enabled()
        if self.size > 1 and op.scope is _WORLD and not watched:
            self.check_usable(op)
            started = time.perf_counter()
            done = engine.sum_now(op, lambda: self._begin_and_wait(op))
            if done is True:
                return Work.over(op, ledger, started=started, timeout=self.timeout)
            if isinstance(done, Work):
                done.wait_done()
                return done
        work = self._put(op)
        if not work.is_completed():
            ledger.waited(work)
            if not engine.drive_for(work):
                engine.wake()
        work.wait_done()
        return work

    def _begin_and_wait(self, op: Collective) -> Work:
        work = self.begin(op)
        self.ledger.waited(work)
        return work

    def _put(self, op: Collective) -> Work:
        if any(t.is_cuda for t in op.tensors):
            torch.cuda.current_stream(op.device).synchronize()
        work = self.begin(op)
        if self.size == 1 and is_identity(op):
            work.finish()
        elif not work.is_completed():
            self._engine.put(work)
        return work

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """A flat tensor in this rank's heap, which grows as needed; other devices' memory is ordinary."""
        if (device := torch.device(device)).type != "cpu":
            warn_of_copies(device, self.size)
            return super().allocate(numel, dtype=dtype, device=device)
        self.refuse_in_child(f"allocate({numel}, dtype={dtype})")
        if self.closed:
            raise ClosedError(
                f"allocate({numel}, dtype={dtype}) on {self}: the group is closed. Allocate before close()."
            )
        try:
            t = self._heap.tensor(numel, dtype)
        except SharedMemoryFull as error:  # every collective takes memory of either sort, on each rank
            warn_once(error)
            return super().allocate(numel, dtype=dtype, device=device)
        self._engine.programs.all_reduce.prepare(dtype, t.nbytes)
        return t

    def in_heap(self, t: Tensor) -> bool:
        """Whether `t` lies in this rank's heap, so that a collective on it copies nothing."""
        return t.device.type == "cpu" and self._views.offset_in_heap(t) >= 0

    def arrivals(self, work: Work) -> Arrivals | None:
        """Which ranks have arrived: read from the board."""
        if work.op.kind.is_p2p:
            return None if work.op.peer is None else Arrivals((self.rank,), (work.op.peer,))
        return self._engine.arrivals(work)

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        """A group with a segment of its own."""
        return SharedMemoryGroup(
            PrefixStore(name, self._store),
            ranks.index(self.rank),
            len(ranks),
            timeout=self.timeout,
            name=name,
            **self._options,
        )

    # -- failures and the end ------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Fail here, and notify the other ranks."""
        first = self.failure is None
        super().fail(error)
        if first and not self.closed and not self.forked:
            self._heap.hold_back()
            self._board.set_state(*report(error))
            self._board.wait_queue.wake(self.rank)

    def check_peers(self) -> None:
        """Check the board and the other ranks' processes now."""
        if self.failure is None and not self.closed and not self.forked:
            error = self._engine.diagnosis.trouble(self._engine.waiting())
            if error is not None:
                self.fail(error)
        super().check_peers()

    def recover(self, timeout: float | None = None) -> None:
        """Meet the other ranks and count operations from the beginning."""
        self.refuse_in_child("recover()")
        if isinstance(self.failure, PeerLost):
            raise again(self.failure)
        self._engine.recover(self._recovery_limit(timeout))
        self.failure = None

    def _release(self) -> None:
        self._engine_finalizer()


def _stop(engine: Engine, segment: Segment) -> None:
    engine.stop()
    segment.close()


def _reserve(segment: Segment, rank: int) -> Callable[[int, int], None]:
    return lambda offset, nbytes: segment.reserve(offset, nbytes, what=f"heap of rank {rank}")


def _sleep(waiting: str, segment: Segment) -> Sleep:
    if waiting == "polling" or (waiting == "auto" and not Futex.available()):
        return Polling(segment.view)
    return Futex(segment.address)


# -- how the ranks find each other -------------------------------------------------------------------------------------------


def _meet(group: SharedMemoryGroup, rendezvous: Rendezvous, directory: str, room: int) -> tuple[Segment, SegmentPlan]:
    """Rank 0 makes the segment and the others find it through the store: the segment, and where everything is in it."""
    size, key = group.size, rendezvous.key("ticket")
    if group.rank == 0:
        segment, ticket = Segment.create(ranks=size, nbytes=room, directory=directory, host=host_identity())
        try:
            chunk = SegmentPlan.fitting(size, segment.free).chunk
            plan = SegmentPlan(size, segment.nbytes, chunk)
            segment.reserve(0, plan.heaps, what="board and staging buffers")
            rendezvous.store.set(key, json.dumps({**asdict(ticket), "chunk": chunk}))
        except BaseException:
            segment.close()
            raise
        group.ledger.identify(derived_id(ticket.token))
        return segment, plan
    announced = json.loads(rendezvous.receive(key, source=0))
    chunk = announced.pop("chunk")
    segment = _join(group, Ticket(**announced))
    return segment, SegmentPlan(size, segment.nbytes, chunk)


def _join(group: SharedMemoryGroup, ticket: Ticket) -> Segment:
    here = host_identity()
    if ticket.host != here:
        raise GroupError(
            f"{group}: rank 0 runs on another host or in another container ({ticket.host}) than this rank ({here}). Memory can "
            "be shared within one host only: use HierarchicalGroup, or gloo."
        )
    if ticket.ranks != group.size:
        raise GroupError(f"{group}: rank 0 has made a segment for {ticket.ranks} ranks. Give all ranks the same size.")
    segment = Segment.join(ticket)
    group.ledger.identify(derived_id(ticket.token))
    return segment


def _wait_until_all_mapped(board: Board, rendezvous: Rendezvous) -> None:
    def all_mapped() -> bool:
        return 0 not in board.states.tolist()

    def wait(seconds: float) -> bool:
        if not all_mapped():
            board.wait_queue.sleep(all_mapped, board.fence, min(seconds, 0.05))
        return all_mapped()

    def late() -> GroupError | None:
        states = board.states.tolist()
        missing = [r for r, state in enumerate(states) if not state]
        return rendezvous.absent(missing, [r for r, state in enumerate(states) if state]) if missing else None

    rendezvous.wait_until(wait, late)
    board.fence()

"""`SharedMemoryGroup`: ranks are processes of one host, and an all-reduce of the group's own memory is one pass over it.

    group = SharedMemoryGroup(store, rank, size)
    bucket = group.allocate(1_000_000)       # in the heap that all ranks can reach
    group.all_reduce(bucket)                 # nothing is copied

The segment (`segment.py`) holds the board (`board.py`), message slots, staging buffers and one heap per rank (`heap.py`);
`programs.py` picks the program of a collective, `p2p.py` has sends and receives. `engine.py` drives both, `diagnosis.py` finds out
which rank is missing or has failed, and `sync.py` argues why all that is right.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from gradwire.collectives import Collective, Scope
from gradwire.collectives.lower import is_identity
from gradwire.errors import ClosedError, GroupError, SharedMemoryFull, UsageError
from gradwire.groups.base import DEFAULT_TIMEOUT, Group
from gradwire.groups.forked import finalize_here
from gradwire.groups.ledger import Arrivals, profiler_enabled
from gradwire.groups.shared_memory.board import HERE, Board, SegmentPlan
from gradwire.groups.shared_memory.diagnosis import Diagnosis, Pulse, report
from gradwire.groups.shared_memory.engine import SharedMemoryEngine
from gradwire.groups.shared_memory.heap import Heap
from gradwire.groups.shared_memory.segment import Segment, Ticket, default_directory
from gradwire.groups.shared_memory.sync import Futex, Polling
from gradwire.groups.store.rendezvous import Rendezvous, check_meetings
from gradwire.groups.work import Work
from gradwire.recorder.source import derived_id
from gradwire.runtime.cleanup import on_failure
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
        """`directory` is where the segment lies (a tmpfs; /dev/shm), `room` how many bytes it can become, for all ranks together.
        `waiting` names how ranks sleep, where the best way must not be used; it must be the same on all ranks."""
        super().__init__(rank, size, name=name or "shared-memory", timeout=timeout)
        self._store = store
        self._options: dict[str, Any] = {"directory": directory, "room": room, "waiting": waiting}
        room = max(ROOM, size * ROOM_PER_RANK) if room is None else room
        least = SegmentPlan(size, 0, wide=False).heaps + size * _SMALLEST_HEAP
        if not isinstance(room, int) or not least <= room <= sys.maxsize:
            raise UsageError(
                f"{self}: room={room!r} is not enough, or too much. Omit it or pass {least} bytes or more."
            )
        if waiting not in ("auto", "futex", "polling"):
            raise UsageError(f"{self}: waiting={waiting!r} is unknown. Choose auto, futex or polling.")
        rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=self)
        with rendezvous.meeting(rendezvous.next_key("gradwire/shared-memory")):
            segment, plan = _meet(self, rendezvous, directory or default_directory(), room)
            with on_failure(segment.close):
                polls = waiting == "polling" or (waiting == "auto" and not Futex.available())
                sleep = Polling(segment.view) if polls else Futex(segment.address)
                self._board = board = Board(segment, plan, rank, sleep)
                start = plan.heap(rank)
                reserve = partial(segment.reserve, what=f"heap of rank {rank}")
                self._heap = Heap(segment.memory, start, start + plan.heap_stride, reserve)
                board.pids[rank] = os.getpid()
                board.set_state(HERE)
                rendezvous.exchange("mapped", "yes")
                board.fence()
                diagnosis = Diagnosis(self.ledger, board, Pulse(board.pids.tolist()))
        self._segment = segment
        self._engine = SharedMemoryEngine(board, self._heap, diagnosis, weakly(self.fail))
        # After the base class's finalizer was made, so that at exit this one runs first.
        self._engine_finalizer = finalize_here(self, _stop, self._engine, segment)

    def submit(self, op: Collective) -> Work:
        work = self._put(op)
        if not work.is_completed():
            self._engine.wake()
        return work

    def submit_and_wait(self, op: Collective) -> Work:
        """Carry it out in this thread, unless another one is driving the group."""
        engine, ledger = self._engine, self.ledger
        # A plain sum can be wrong for this group in its scope and its memory only; nothing may be signaled before that is checked.
        watched = ledger.events or ledger.hooks or profiler_enabled()
        if self.size > 1 and op.scope is _WORLD and not watched:
            self.check_usable(op)
            _check_memory(op)
            started = time.perf_counter()

            def begin() -> Work:
                work = self.begin(op)
                ledger.waited(work)
                return work

            done = engine.sum_now(op, begin)
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

    def _put(self, op: Collective) -> Work:
        _check_memory(op)
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
            if device.type == "cuda" and self.size > 1:
                _warn_once(
                    "copies",
                    f"gradients on {device} are copied to the host and back in every step: shared memory, which carries them "
                    f"between the {self.size} ranks, is the host's. Give every rank a GPU of its own, and gw.init() takes NCCL "
                    "(`gradwire run --nproc gpu`).",
                )
            return super().allocate(numel, dtype=dtype, device=device)
        self.refuse_in_child(f"allocate({numel}, dtype={dtype})")
        if self.closed:
            raise ClosedError(f"allocate({numel}, dtype={dtype}) on {self}: it is closed. Allocate before close().")
        try:
            t = self._heap.tensor(numel, dtype)
        except SharedMemoryFull as error:  # every collective takes memory of either sort, on each rank
            way = "Until then, tensors that do not fit are in ordinary memory, and are copied on their way."
            _warn_once("room", f"{error} {way}")
            return super().allocate(numel, dtype=dtype, device=device)
        self._engine.programs.prepare(dtype, t.nbytes)
        return t

    def in_heap(self, t: Tensor) -> bool:
        """Whether `t` lies in this rank's heap, so that a collective on it copies nothing."""
        return t.device.type == "cpu" and self._board.offset_in_heap(t.data_ptr()) >= 0

    def arrivals(self, work: Work) -> Arrivals | None:
        return super().arrivals(work) if work.op.kind.is_p2p else self._engine.arrivals(work)

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        store, rank = PrefixStore(name, self._store), ranks.index(self.rank)
        return SharedMemoryGroup(store, rank, len(ranks), timeout=self.timeout, name=name, **self._options)

    def fail(self, error: BaseException) -> None:
        first = self.failure is None
        super().fail(error)
        if first and not self.closed and not self.forked:
            self._heap.holds_back = True
            self._board.set_state(*report(error))
            self._board.wait_queue.wake(self.rank)

    def _look_at_peers(self) -> None:
        diagnosis, waiting = self._engine.diagnosis, self._engine.waiting()
        if (error := diagnosis.death(waiting) or diagnosis.failure(waiting)) is not None:
            self.fail(error)

    def recover(self, timeout: float | None = None) -> None:
        self._engine.recover(self._recovery_limit(timeout))
        self.failure = None

    def _release(self) -> None:
        self._engine_finalizer()


_WARNED: set[str] = set()


def _warn_once(about: str, text: str) -> None:
    if about not in _WARNED:  # in this process
        _WARNED.add(about)
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def _stop(engine: SharedMemoryEngine, segment: Segment) -> None:
    engine.stop()
    segment.close()


def _meet(group: SharedMemoryGroup, rendezvous: Rendezvous, directory: str, room: int) -> tuple[Segment, SegmentPlan]:
    """Rank 0 makes the segment and the others find it through the store: the segment, and where everything is in it."""
    size, key, here = group.size, rendezvous.key("ticket"), host_identity()
    if group.rank == 0:
        segment, ticket = Segment.create(ranks=size, nbytes=room, directory=directory, host=here)
        with on_failure(segment.close):
            plan = SegmentPlan.fitting(size, segment.nbytes, segment.free)
            segment.reserve(0, plan.heaps, what="board and staging buffers")
            rendezvous.store.set(key, json.dumps({**asdict(ticket), "chunk": plan.chunk, "wide": plan.wide}))
    else:
        announced = json.loads(rendezvous.receive(key, source=0))
        chunk, wide = announced.pop("chunk"), announced.pop("wide")
        ticket = Ticket(**announced)
        if ticket.host != here:
            raise GroupError(
                f"{group}: rank 0 runs on another host or in another container ({ticket.host}) than this rank ({here}). Memory can "
                "be shared within one host only: use HierarchicalGroup, or gloo."
            )
        if ticket.ranks != size:
            raise GroupError(
                f"{group}: rank 0 has made a segment for {ticket.ranks} ranks. Give all ranks the same size."
            )
        try:
            segment = Segment.join(ticket)
        except GroupError:
            rendezvous.all_processes()
            check_meetings()  # rank 0 may have ended: then that is what to raise
            raise
        plan = SegmentPlan(size, segment.nbytes, chunk, wide=wide)
    group.ledger.identify(derived_id(ticket.token))
    return segment, plan


def _check_memory(op: Collective) -> None:
    """Raise if a tensor has no memory that could be copied: to try would end the process."""
    for t in op.inputs if op.outputs is op.inputs else op.inputs + op.outputs:
        if t.layout is torch.strided and not t.data_ptr() and t.numel():
            raise UsageError(
                f"{op}: a tensor of type {type(t).__name__} has no memory of its own. Its storage was freed, or it wraps other "
                "tensors: pass those."
            )

"""`MPIGroup`: the ranks of an MPI communicator as a Group. Starts under `mpirun`; needs no rebuild of torch.

What MPI takes is handed to it in the caller's thread, in order; what it lacks is lowered to what it takes and runs as a program
on the group's lane. `native.py` posts MPI's collectives, `engine.py` makes progress, `runtime.py` ends the process in order.

Note [An operation that was given up]
When a deadline passes, the operation fails here; in MPI it goes on, and so does a program on the lane, because the others may
still join, and the n-th collectives of all ranks must meet. If they do, the group stays usable. Leave the tensors of such an
operation alone until the group is closed or has recovered.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch._C._distributed_c10d import Store

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.lower import Program, lower
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import CollectiveMismatch, GroupAborted, GroupError, UsageError, UsageTypeError
from gradwire.groups.base import DEFAULT_TIMEOUT, Group
from gradwire.groups.forked import finalize_here
from gradwire.groups.ledger import CLOSED, Arrivals
from gradwire.groups.mpi.engine import MpiEngine, tag_of
from gradwire.groups.mpi.native import Native
from gradwire.groups.mpi.pending_requests import PendingRequests
from gradwire.groups.mpi.runtime import Comm, OwnedComm, runtime
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.groups.work import Work
from gradwire.recorder.source import derived_id
from gradwire.runtime.threads import Worker, weakly

_FINAL_MESSAGES = 0.3
"""Seconds in which a message that a leaving rank has sent must have arrived."""


class MPIGroup(Group):
    """Ranks of an MPI communicator: of all processes that mpirun started, or of `comm`, which every one of its ranks passes.

    The group communicates in a duplicate, apart from other users of `comm` and other groups over it. Tensors are on the CPU.
    """

    identifies_itself = True

    def __init__(self, comm: Any = None, *, timeout: float = DEFAULT_TIMEOUT, name: str | None = None) -> None:
        self._runtime = runtime()
        mpi = self._runtime.mpi
        parent = mpi.COMM_WORLD if comm is None else comm.comm if isinstance(comm, OwnedComm) else comm
        if not isinstance(parent, mpi.Intracomm) or parent == mpi.COMM_NULL:
            raise UsageTypeError(
                f"MPIGroup({comm!r}): not a communicator of one group of ranks. Pass an mpi4py Intracomm, or nothing for all."
            )
        super().__init__(parent.rank, parent.size, name=name or "mpi", timeout=timeout)
        self.ledger.identify(_next_id(mpi, parent))
        self._runtime.sweep()
        self._native = Native(mpi)
        self._lane = Worker(f"program-{self.name}-{self.rank}")
        self._order = threading.Lock()
        self._revival: tuple[Comm, Any] | None = None
        what = f"making MPIGroup {self.name!r} on rank {self.rank} of {self.size}"
        spare = parent if isinstance(comm, OwnedComm) else self._runtime.duplicate(parent, timeout, what)
        self._engines = [self._engine_on(self._runtime.duplicate(spare, timeout, what), spare)]
        # After the base class's finalizer was made, so that at exit these threads end first.
        self._threads_finalizer = finalize_here(self, _leave, self._lane, self._engines)

    @classmethod
    def over_store(
        cls, store: Store, rank: int, size: int, *, timeout: float = DEFAULT_TIMEOUT, name: str | None = None
    ) -> MPIGroup:
        """The group of `size` processes of one mpirun that meet in `store`, in the order of the ranks they claim there."""
        timeout_seconds("MPIGroup.over_store", timeout)  # before any wait
        here = runtime()
        world = here.mpi.COMM_WORLD
        what = f"making MPIGroup {name or 'mpi'!r} on rank {rank} of {size}"
        rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=what)
        ranks, key = world_ranks(rendezvous, world.rank, world.size, what=what)
        tag = tag_of(f"{name} {ranks} {key}", Native(here.mpi).tag_limit)
        return cls(here.part_of(world, ranks, tag, timeout, what), timeout=timeout, name=name)

    def _engine_on(self, comm: Comm, spare: Comm) -> MpiEngine:
        label = f"{self.name}-{self.rank}"
        return MpiEngine(self._runtime, self._native, comm, spare, name=label, on_change=weakly(self._check_news))

    @property
    def _engine(self) -> MpiEngine:
        return self._engines[-1]

    # -- the one verb --------------------------------------------------------------------------------------------------

    def check_usable(self, op: Collective) -> None:
        """As in Group; refuses tensors that are not in host memory, and tags that MPI does not have."""
        super().check_usable(op)
        if op.device.type != "cpu":
            raise UsageError(
                f"{op} on {self}: its tensors are on {op.device}, and MPIGroup moves host memory. Copy them to the CPU, or use "
                "from_process_group with NCCL."
            )
        if op.tag > self._native.tag_limit:
            raise UsageError(f"{op} on {self}: the tag is too large. This MPI has tags up to {self._native.tag_limit}.")

    def submit(self, op: Collective) -> Work:
        if op.kind.is_p2p:
            work = self.begin(op, MPIWork)
            self._start(work, self._engine, self._program(op))
            return work
        with self._order:
            work = self.begin(op, MPIWork)
            engine = self._engine
            engine.joined += 1
            work.place = engine.joined
            if self._lane.idle and self._native.takes(op):
                self._start(work, engine, iter((op,)))
            else:
                self._lane.put(lambda: self._run_program(work, engine))
        return work

    def _start(self, work: MPIWork, engine: MpiEngine, program: Iterator[Collective]) -> None:
        """One step is the whole operation, but for what a message from or into strided memory needs before and after."""
        if work.settled:
            return
        work.ledger.started(work, time.perf_counter())

        def done(pending: PendingRequests) -> None:
            try:
                source = self._source(step, pending)
                next(program, None)
                work.finish(source_rank=source)
            except Exception as error:
                self._fail_operation(work, error)

        try:
            step = next(program)
            pending = engine.post(step, done)
        except Exception as error:
            self._fail_operation(work, error)
            return
        if pending is not None:  # else the group is ending, and fails what is in its ledger
            work.watch(engine, pending)

    def _run_program(self, work: MPIWork, engine: MpiEngine) -> None:
        """On the lane: one step after another. See Note [An operation that was given up]."""
        work.ledger.started(work, time.perf_counter())
        program = self._program(work.op)
        try:
            for step in program:
                pending = None if engine.ended else engine.post(step)
                if pending is None or not engine.wait(pending, float("inf"), lambda: engine.ended):
                    engine.clean = False  # the others may have begun steps that this rank never will
                    return
                self._source(step, pending)
            work.finish()
        except Exception as error:
            self._fail_operation(work, error)
        finally:
            program.close()

    def _program(self, op: Collective) -> Program:
        return lower(op, rank=self.rank, size=self.size, takes=self._native.takes)

    def _source(self, step: Collective, pending: PendingRequests) -> int | None:
        """The sender, if it is a receive; raises if a request failed or a message has another length."""
        if pending.error is not None:
            raise pending.error
        for wrong in [receive for receive in pending.receives if receive.discarded is not None]:
            raise CollectiveMismatch(
                f"{step} on rank {self.rank} of {self}: rank {wrong.sender} sent {wrong.length} bytes, but there is room for "
                f"{wrong.place.nbytes}. Both sides need the same dtype and number of elements."
            )
        return pending.receives[0].sender if step.kind is OpKind.RECV else None

    # -- failures ------------------------------------------------------------------------------------------------------

    def _fail_operation(self, work: MPIWork, error: Exception) -> None:
        """MPI failed: so does the operation, and, unless it was a message, the group, whose ranks are not in step any more."""
        mpi, cause = self._runtime.mpi, error
        if isinstance(cause, mpi.Exception):
            error = GroupError(f"{self.ledger.where(work)}: MPI failed: {cause}. Look at the other ranks' output.")
            if cause.Get_error_class() == mpi.ERR_TRUNCATE:
                error = CollectiveMismatch(
                    f"{self.ledger.where(work)}: another rank sent more than there is room for. MPI may have overwritten what lay "
                    "behind it, so do not trust this process any more. All ranks must submit the same operation, with the same "
                    f"sizes; the Verified wrapper finds the rank that did not, before anything is moved. MPI's error: {cause}"
                )
            error.__cause__ = cause
        work.fail(error)
        if not work.op.kind.is_p2p and not isinstance(error, UsageError):
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        if self.forked:
            return
        first = self.failure is None
        self._fail_here(error)
        if first:
            reason = error.reason if isinstance(error, GroupAborted) else f"{type(error).__name__}: {error}"
            self._engine.send_abort(f"rank {self.rank} aborted: {reason}")

    def _fail_here(self, error: BaseException) -> None:
        super().fail(error)
        self._engine.ended = True

    def _check_news(self) -> None:
        """In the engine's thread: fail if a rank has aborted, or has left before it joined what is in flight here."""
        if self.failure is not None or self.closed:
            return
        engine, pending = self._engine, list(self.ledger.pending.values())
        if engine.aborted is not None:
            self._fail_here(self.ledger.aborted(engine.aborted, pending[0] if pending else None))
            return
        now = time.perf_counter()
        left = {rank: peer for rank, peer in engine.peers.items() if peer.left is not None}
        gone = {rank for rank, peer in left.items() if now - (peer.left or 0.0) > _FINAL_MESSAGES}
        for rank, peer in left.items():
            for work in pending:
                awaited = set(engine.peers) if work.op.peer is None else {work.op.peer}
                unsent = work.op.kind.is_p2p and rank in awaited <= gone
                if work.place > peer.joined or unsent:
                    self._fail_here(self.ledger.lost(rank, CLOSED, work))
                    return

    def _look_at_peers(self) -> None:
        self._engine.progress()

    def recover(self, timeout: float | None = None) -> None:
        """Meet the other ranks on a communicator that was kept idle for this, and go on over a new one."""
        limit = self._recovery_limit(timeout)
        if self.closed:
            super().recover(timeout)
            return
        old = self._engine
        old.ended = True
        lost = GroupAborted(f"{self}: recover() was called with the operation in flight.", reason="recovery")
        self.ledger.fail_all(lost)
        if self._revival is None:  # a second try waits for the same meeting
            with self._runtime.lock:
                self._revival = old.spare.Idup()
        comm = self._runtime.made(self._revival, limit, f"recovery of {self}")
        self._revival = None
        with self._order:
            self._engines[:] = [self._engine_on(comm, old.spare)]
            self.failure = None
        old.retire()

    def arrivals(self, work: Work) -> Arrivals | None:
        if work.op.kind.is_p2p:
            return super().arrivals(work)
        place, engine = work.place, self._engine
        engine.ask(place)
        return Arrivals.of({self.rank, *(r for r, peer in engine.peers.items() if peer.joined >= place)}, self.size)

    # -- members and life ----------------------------------------------------------------------------------------------

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        comm = self._engine.comm
        what = f"making MPIGroup {name!r} of ranks {ranks} of {self}"
        tag = tag_of(name, self._native.tag_limit)
        return MPIGroup(self._runtime.part_of(comm, ranks, tag, self.timeout, what), timeout=self.timeout, name=name)

    def _release(self) -> None:
        self._engine.clean &= self.failure is None
        self._threads_finalizer()


_made: Counter[tuple[int, ...]] = Counter()
"""How many groups of these ranks of MPI's world were made: each of them by all its ranks, in the same order."""


def _next_id(mpi: Any, comm: Any) -> int:
    """The identity, for records, of a new group over `comm`. Its ranks share their numbers in MPI's world."""
    ranks = tuple(comm.Get_group().Translate_ranks(None, mpi.COMM_WORLD.Get_group()))
    _made[ranks] += 1
    return derived_id("mpi", ranks, _made[ranks])


def world_ranks(rendezvous: Rendezvous, world_rank: int, world_size: int, *, what: str) -> tuple[list[int], str]:
    """The MPI ranks of processes that meet in a store, in the order of their ranks there, and the group's key in the store."""
    key, size = rendezvous.next_key("gradwire/mpi"), rendezvous.size
    with rendezvous.meeting(key):
        ranks = [int(value) for value in rendezvous.exchange("world-ranks", str(world_rank))]
    twice = [r for r, times in Counter(ranks).items() if times > 1]
    if twice:
        raise UsageError(
            f"{what}: its ranks are processes {ranks} of MPI's world of {world_size}, so {twice} stand for several. "
            f"Start all {size} processes with one mpirun (mpirun -n {size} python ...), not by torchrun or by hand."
        )
    return ranks, key


def _leave(lane: Worker, engines: list[MpiEngine]) -> None:
    for engine in engines:
        engine.ended = True
    lane.stop(timeout=2.0)
    for engine in engines:
        engine.leave()


class MPIWork(Work):
    """An operation that is one PendingRequests; one that is a program of several has none, and is settled by the lane."""

    _pending: tuple[MpiEngine, PendingRequests] | None = None

    def watch(self, engine: MpiEngine, pending: PendingRequests) -> None:
        self._pending = engine, pending
        if self.settled:
            self._pending = None

    def _settle(self, outcome: list[BaseException | None], source_rank: int | None) -> bool:
        self._pending = None  # a caller that keeps this Work must not keep the requests
        return super()._settle(outcome, source_rank)

    def is_completed(self) -> bool:
        if (watched := self._pending) is not None and not self.settled:
            engine, pending = watched
            engine.poll(pending)
        return self.settled

    def wait_settled(self, limit: float) -> bool:
        until = time.perf_counter() + limit
        if (watched := self._pending) is not None:
            engine, pending = watched
            engine.wait(pending, until, lambda: self.settled)
        return super().wait_settled(max(0.0, until - time.perf_counter()))

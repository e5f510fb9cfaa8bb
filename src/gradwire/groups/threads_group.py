"""`ThreadGroup`: ranks as threads of one process. It has no sockets and no helper threads: the last rank to join an
operation carries it out for all, in rank order, so results are bitwise the same in every run."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

import torch

from gradwire import errors
from gradwire.collectives import Collective, OpKind
from gradwire.collectives.matching import mismatch
from gradwire.collectives.reference import perform, store
from gradwire.groups.base import DEFAULT_TIMEOUT, Group
from gradwire.groups.failure.watchdog import Watchdog
from gradwire.groups.ledger import CLOSED, Arrivals
from gradwire.groups.work import Work, settle_together
from gradwire.recorder.source import new_id


class ThreadGroup(Group):
    """One rank of a world of threads. A send is done when it has been received, as in MPI's synchronous mode."""

    tells_mismatch = True
    in_one_process = True
    identifies_itself = True

    def __init__(self, rank: int, table: _ThreadWorld) -> None:
        super().__init__(rank, table.size, name=table.name, timeout=table.timeout, watchdog=table.watchdog)
        self.ledger.identify(table.group_id)
        self._table = table
        self._joined = itertools.count()

    @classmethod
    def world(cls, size: int, *, name: str = "threads", timeout: float = DEFAULT_TIMEOUT) -> list[ThreadGroup]:
        """The groups of `size` ranks, in rank order.

        >>> import torch
        >>> a, b = ThreadGroup.world(2)
        >>> x, y = torch.ones(2), torch.ones(2)
        >>> first = a.all_reduce(x, async_op=True)  # rank 0 does not wait
        >>> second = b.all_reduce(y)  # rank 1 completes it for both
        >>> first.wait(), x
        (True, tensor([2., 2.]))
        >>> a.close(), b.close()
        (None, None)
        """
        if size < 1:
            raise errors.UsageError(f"ThreadGroup.world({size}): a world has at least one rank.")
        return _ThreadWorld(size, name, timeout, cls).groups

    def submit(self, op: Collective) -> Work:
        """Join the operation; the last rank to join carries it out before it returns."""
        work = self.begin(op)
        if op.device.type == "cuda":
            torch.cuda.current_stream(op.device).synchronize()
        if op.kind.is_p2p:
            self._table.meet(work, self.rank)
        else:
            self._table.join(work, self.rank, next(self._joined))
        return work

    def arrivals(self, work: Work) -> Arrivals | None:
        return self._table.arrivals(work, self.rank)

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        return self._table.subtable(name, len(ranks)).groups[ranks.index(self.rank)]

    def fail(self, error: BaseException) -> None:
        """Fail the group on every rank: all are threads of this process."""
        if self.forked:
            return
        for group in self._table.groups:
            Group.fail(group, error)

    def abort(self, reason: str = "abort() was called") -> None:
        self.fail(errors.GroupAborted(f"{self.name} was aborted by rank {self.rank}: {reason}", reason=reason))

    def recover(self, timeout: float | None = None) -> None:
        self._table.start_over(self.rank, self._recovery_limit(timeout))

    def start_over(self) -> None:
        """This rank's part of a recovery: clear the failure and the count of joined operations."""
        self.failure = None
        self._joined = itertools.count()

    def _release(self) -> None:
        self._table.leave(self.rank)


class _ThreadWorld:
    """Where the ranks of one world meet. All state is under one lock; data moves outside it."""

    def __init__(self, size: int, name: str, timeout: float, kind: type[ThreadGroup] = ThreadGroup) -> None:
        self.size = size
        self.name = name
        self.timeout = timeout
        self.group_id = new_id()
        self.watchdog = Watchdog(name, owners=size)
        self._lock = threading.Lock()
        self._slots: dict[int, dict[int, Work]] = {}
        self._p2p: list[tuple[Work, int]] = []
        self._left: dict[int, None] = {}
        self._subtables: WeakValueDictionary[str, _ThreadWorld] = WeakValueDictionary()  # kept alive by their groups
        self._recovering: set[int] = set()
        self._recoveries = 0
        self._all_recovering = threading.Condition(self._lock)
        self.groups = [kind(rank, self) for rank in range(size)]

    def subtable(self, name: str, size: int) -> _ThreadWorld:
        with self._lock:
            table = self._subtables.get(name)
            if table is None or len(table._left) == table.size:  # all ranks have closed theirs
                table = self._subtables[name] = _ThreadWorld(size, name, self.timeout)
            return table

    def join(self, work: Work, rank: int, place: int) -> None:
        with self._lock:
            slot = self._slots.setdefault(place, {})
            slot[rank] = work
            complete = len(slot) == self.size
            if complete:
                del self._slots[place]
            lost = [r for r in self._left if r not in slot]
        if complete:
            self._carry_out([slot[r] for r in range(self.size)])
        elif lost:
            work.fail(work.ledger.lost(lost[0], CLOSED, work))

    def _carry_out(self, works: Sequence[Work]) -> None:
        now = time.perf_counter()
        for work in works:
            work.ledger.started(work, now)
        error: Exception | None = self._obstacle(works)
        if error is None:
            try:
                perform([work.op for work in works])
                if works[0].op.device.type == "cuda":
                    torch.cuda.synchronize(works[0].op.device)
            except Exception as problem:
                submitted = "; ".join(f"rank {rank}: {work.op}" for rank, work in enumerate(works))
                error = errors.GroupError(
                    f"{self.name}: an operation could not be carried out: {problem}. Submitted: {submitted}. "
                    "Ranks must agree on the sizes they send and receive."
                )
                error.__cause__ = problem
        settle_together([(work, None) for work in works], error)

    def _obstacle(self, works: Sequence[Work]) -> Exception | None:
        gave_up = [r for r, work in enumerate(works) if work.is_completed()]
        if gave_up:
            op, joined = works[0].op, [r for r in range(self.size) if r not in gave_up]
            text = f"{op} of {self.name}: ranks {gave_up} timed out before the others joined. Use a longer timeout."
            return errors.CollectiveTimeout(text, op=op.signature, joined=joined, missing=gave_up)
        # Labels are for humans and may differ between ranks. The Verified wrapper compares them too.
        signatures = [work.op.signature for work in works]
        return mismatch(self.name, signatures, compared=[replace(s, label="") for s in signatures])

    def meet(self, work: Work, rank: int) -> None:
        with self._lock:
            self._p2p = [(other, r) for other, r in self._p2p if not other.is_completed()]
            match = next((entry for entry in self._p2p if _fits(work, rank, *entry)), None)
            if match is not None:
                self._p2p.remove(match)
            elif (lost := self._lost_to(work, rank)) is None:
                self._p2p.append((work, rank))
        if match is not None:
            other, other_rank = match
            if work.op.kind is OpKind.SEND:
                _deliver(work, rank, other)
            else:
                _deliver(other, other_rank, work)
        elif lost is not None:
            work.fail(work.ledger.lost(lost, CLOSED, work))

    def _lost_to(self, work: Work, rank: int) -> int | None:
        """A rank that has left, if all that a message of `rank` can go to or come from have."""
        peers = self._peers(work, rank)
        return peers[-1] if all(r in self._left for r in peers) else None

    def _peers(self, work: Work, rank: int) -> tuple[int, ...]:
        """The ranks that a message of `rank` can go to or come from."""
        return tuple(r for r in range(self.size) if r != rank) if work.op.peer is None else (work.op.peer,)

    def arrivals(self, work: Work, rank: int) -> Arrivals | None:
        if work.op.kind.is_p2p:
            return Arrivals(joined=(rank,), missing=self._peers(work, rank))
        with self._lock:
            slot = next((s for s in self._slots.values() if s.get(rank) is work), range(self.size))
            return Arrivals.of(list(slot), self.size)

    def start_over(self, rank: int, timeout: float) -> None:
        """Wait for all ranks; the last one resets the world. A rank that times out withdraws, so that all can try again."""
        with self._lock:
            self._recovering.add(rank)
            if len(self._recovering) == self.size:
                self._recovering.clear()
                self._recoveries += 1
                self._slots.clear()
                self._p2p.clear()
                for group in self.groups:  # no rank submits: all are in recover()
                    group.start_over()
                self._all_recovering.notify_all()
                return
            before = self._recoveries
            if self._all_recovering.wait_for(lambda: self._recoveries > before, timeout):
                return
            known = Arrivals.of(self._recovering, self.size)
            self._recovering.discard(rank)
        raise self.groups[rank].ledger.not_recovered(known, timeout)

    def leave(self, rank: int) -> None:
        with self._lock:
            self._left[rank] = None
            stranded = [work for slot in self._slots.values() if rank not in slot for work in slot.values()]
            stranded += [work for work, r in self._p2p if self._lost_to(work, r) is not None]
        for work in stranded:
            work.fail(work.ledger.lost(rank, CLOSED, work))


def _fits(work: Work, rank: int, other: Work, other_rank: int) -> bool:
    a, b = work.op, other.op
    return a.kind is not b.kind and a.tag == b.tag and a.peer in (None, other_rank) and b.peer in (None, rank)


def _deliver(send: Work, source: int, recv: Work) -> None:
    value, place = send.op.inputs[0], recv.op.outputs[0]
    error: Exception | None = None
    now = time.perf_counter()
    for work in (send, recv):
        work.ledger.started(work, now)
    try:
        if value.dtype != place.dtype or value.numel() != place.numel():
            raise errors.CollectiveMismatch(
                f"{recv.ledger.name}: rank {source} sends {send.op} but rank {recv.ledger.rank} receives {recv.op}. "
                "Both sides need the same dtype and number of elements.",
                ops={source: send.op.signature, recv.ledger.rank: recv.op.signature},
            )
        store(place, value)
    except Exception as problem:
        error = problem
    settle_together([(recv, source), (send, None)], error)

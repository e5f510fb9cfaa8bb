"""Groups around groups. They nest: `Latched(Deadline(group, seconds=30))`.

A wrapper overrides `submit`, or `program`, and so covers all other verbs: they all call `submit`. `GroupWrapper` passes operations
through, and so do `Deadline`, `Latched` and `Recording`; `TrackedWrapper` settles them itself. `Verified` and `NanCheck`, for
debugging and not for production, add a small collective to every operation.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, Signature, all_gather, all_gather_into_tensor
from gradwire.collectives.finite import is_finite
from gradwire.collectives.lower import Program
from gradwire.collectives.matching import comparable, decode, encode, mismatch
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    NonFiniteGradient,
    Origin,
    UsageError,
    again,
)
from gradwire.groups.base import Group
from gradwire.groups.completion import WorkInfo
from gradwire.groups.forked import finalize_here
from gradwire.groups.ledger import Arrivals, chained
from gradwire.groups.work import Work
from gradwire.runtime.threads import Worker

_DIGEST_BYTES = 24


class GroupWrapper(Group):
    """A group around another: override `submit`, inherit the rest. Shares the inner group's ledger, failure and closed state."""

    shares_ledger: bool = True
    """Whether the inner group's ledger is used, so that an operation is counted once for any number of wrappers."""

    identifies_itself = True

    def __init__(self, inner: Group) -> None:
        self.inner = inner  # first: a subclass may have properties that use it
        name, wraps = f"{type(self).__name__}({inner.name})", inner if self.shares_ledger else None
        super().__init__(inner.rank, inner.size, name=name, timeout=inner.timeout, wraps=wraps)
        if not self.shares_ledger:
            self.ledger.identify(inner.ledger.events.child_id(type(self).__name__))

    tells_mismatch = property(lambda self: self.inner.tells_mismatch)
    in_one_process = property(lambda self: self.inner.in_one_process)
    layout = property(lambda self: self.inner.layout)

    def submit(self, op: Collective) -> Work:
        return self.inner.submit(op)

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return self.inner.allocate(numel, dtype=dtype, device=device)

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """Split the inner group and wrap the part in the same way."""
        part = self.inner.split(color, key)
        return None if part is None else self.rewrap(part)

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        return self.rewrap(self.inner.subgroup(ranks, name=name))

    def rewrap(self, inner: Group) -> Group:
        """The same wrapper around another group: what `split` returns. Override if the constructor takes more arguments."""
        return type(self)(inner)

    def set_timeout(self, timeout: float) -> None:
        super().set_timeout(timeout)
        self.inner.set_timeout(timeout)

    def orders_streams(self, device: torch.device) -> bool:
        return self.inner.orders_streams(device)

    def arrivals(self, work: Work) -> Arrivals | None:
        return self.inner.arrivals(work)

    def abort_device(self) -> None:
        self.inner.abort_device()

    def abort(self, reason: str = "abort() was called") -> None:
        """Abort the inner group, which may be able to notify its peers."""
        self.inner.abort(reason)

    def fail(self, error: BaseException) -> None:
        self.inner.fail(error)

    def check_peers(self) -> None:
        self.inner.check_peers()

    def recover(self, timeout: float | None = None) -> None:
        self.inner.recover(timeout)

    def close(self, timeout: float = 5.0) -> None:
        self.inner.close(timeout)


class Deadline(GroupWrapper):
    """Gives every operation at most `seconds`, then fails it with CollectiveTimeout, which names the missing ranks."""

    def __init__(self, inner: Group, *, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = timeout_seconds(f"Deadline around {inner}", seconds)
        self.timeout = min(self.seconds, inner.timeout)

    def submit(self, op: Collective) -> Work:
        return self.inner.submit(op.within(self.seconds))

    def rewrap(self, inner: Group) -> Group:
        return Deadline(inner, seconds=self.seconds)


class Latched(GroupWrapper):
    """After one operation has failed, refuses every later one at once, with the first failure as the cause: ranks that are out of
    step would match operations that do not belong together, or hang."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.first_failure: BaseException | None = None

    def submit(self, op: Collective) -> Work:
        if self.first_failure is not None:
            why = f"an earlier operation failed with {type(self.first_failure).__name__}: {self.first_failure}"
            text = f"{op} on rank {self.rank} of {self.name}: refused, because {why} Make a new group to continue."
            raise GroupAborted(text, reason=str(self.first_failure)) from self.first_failure
        work = self.inner.submit(op)
        work.add_done_callback(self._note)
        return work

    def recover(self, timeout: float | None = None) -> None:
        super().recover(timeout)
        self.first_failure = None

    def _note(self, work: Work) -> None:
        if self.first_failure is None:
            self.first_failure = work.exception()


class Recording(GroupWrapper):
    """Records what was submitted through it and how it ended: the last `limit` of each, oldest first.

    >>> import torch
    >>> from gradwire.groups import ThreadGroup
    >>> (group,) = map(Recording, ThreadGroup.world(1))
    >>> work = group.all_reduce(torch.zeros(3), label="loss")
    >>> group.submitted
    [Signature(kind=<OpKind.ALL_REDUCE: 'all_reduce'>, shapes=((3,),), dtypes=('float32',), reduce_op=..., label='loss')]
    >>> group.finished[0].kind, group.finished[0].bytes
    ('all_reduce', 12)
    >>> group.close()
    """

    def __init__(self, inner: Group, *, limit: int = 10_000) -> None:
        super().__init__(inner)
        self._limit = limit
        self._submitted: deque[Signature] = deque(maxlen=limit)
        self._finished: deque[WorkInfo] = deque(maxlen=limit)

    @property
    def submitted(self) -> list[Signature]:
        return list(self._submitted)

    @property
    def finished(self) -> list[WorkInfo]:
        """Operations that have finished or failed, in completion order."""
        return list(self._finished)

    def submit(self, op: Collective) -> Work:
        work = self.inner.submit(op)
        self._submitted.append(op.signature)
        work.add_done_callback(lambda done: self._finished.append(done.info))
        return work

    def rewrap(self, inner: Group) -> Group:
        return Recording(inner, limit=self._limit)


class TrackedWrapper(GroupWrapper):
    """A group around another with its own ledger: completion hooks and listeners see the caller's operations.

    Override `program` to turn one operation into several of the inner group. Programs run on a worker thread, in submission
    order, so `submit` never blocks and the steps have the same order on all ranks. Sends and receives pass through. Or override
    `submit` to settle operations yourself: begin a Work, submit something to the inner group, add it to `steps`, settle the Work.
    """

    shares_ledger = False

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.ledger.collect_hook_errors_of(inner.ledger)
        self.steps: dict[int, Work] = {}
        """The inner group's current Work for each operation, by the operation's number."""
        self._worker = Worker(f"program-{self.name}-{self.rank}")
        self._order = threading.Lock()
        self._worker_finalizer = finalize_here(self, self._worker.stop, 2.0)

    def program(self, op: Collective) -> Program:
        """Yield the inner group's operations that make up `op`; raise to fail it."""
        yield op

    def submit(self, op: Collective) -> Work:
        if op.kind.is_p2p:
            return self._pass_through(op)
        with self._order:
            work = self.begin(op)
            self._worker.put(lambda: self._run(work, self._run_program))
        return work

    def _pass_through(self, op: Collective) -> Work:
        work = self.begin(op, _Passed)

        def settle(inner: Work) -> None:
            self.steps.pop(work.seq, None)
            work._settle([inner.exception()], inner.source)

        try:
            self.steps[work.seq] = inner = self.inner.submit(op)
            if self.orders_streams(op.device):
                work.inner = inner
            inner.add_done_callback(settle)
        except Exception as error:
            work.fail(error)
        return work

    def _run(self, work: Work, run: Callable[[Work], object]) -> None:
        """Settle `work` by `run(work)`, on the worker's thread."""
        work.ledger.started(work, time.perf_counter())
        try:
            run(work)
            work.finish()
        except CollectiveTimeout as error:
            work.fail(self.late(work, error))
        except BaseException as error:  # SystemExit too: the thread is needed again
            work.fail(error)
        finally:
            self.steps.pop(work.seq, None)

    def _run_program(self, work: Work) -> None:
        with closing(self.program(work.op)) as program:
            for step in program:
                self.submit_step(work, step).wait_done()

    def submit_step(self, work: Work, op: Collective) -> Work:
        """Submit an operation that is a part of `work`, with what is left of its time. Raises if `work` is over."""
        left = work.deadline - time.perf_counter()
        if left <= 0:
            self.ledger.expire(work)
        if (error := work.exception()) is not None:
            raise again(error)
        self.steps[work.seq] = step = self.inner.submit(op.within(left))
        return step

    def late(self, work: Work, error: CollectiveTimeout) -> CollectiveTimeout:
        """The inner group's timeout, reworded for the caller's operation instead of its step; the missing ranks are the same."""
        return chained(self.ledger.timed_out(work, work.timeout), error)

    def standing(self, op: Collective) -> tuple[int, int]:
        """Refuse: all ranks take part in the steps of a program."""
        raise UsageError(
            f"{op} on {self}: only some ranks take part, but {type(self).__name__} needs all of them for every operation. Wrap the "
            f"parts instead: HierarchicalGroup({type(self).__name__}(inside), across)."
        )

    def check_usable(self, op: Collective) -> None:
        super().check_usable(op)
        self.inner.check_usable(op)

    def orders_streams(self, device: torch.device) -> bool:
        """Never: an operation is complete when the worker thread has settled it."""
        return False

    def arrivals(self, work: Work) -> Arrivals | None:
        """Which ranks have joined the operation's current step."""
        step = self.steps.get(work.seq)
        if step is None:
            return None
        # A group may no longer know which ranks were missing once a step has failed; the error has them.
        late = step.exception()
        if isinstance(late, CollectiveTimeout) and late.joined is not None and late.missing is not None:
            return Arrivals(tuple(late.joined), tuple(late.missing))
        return self.inner.arrivals(step)

    def abort(self, reason: str = "abort() was called") -> None:
        """Abort the inner group, and with it the operations in flight here."""
        self.inner.abort(reason)
        Group.abort(self, reason)

    def fail(self, error: BaseException) -> None:
        Group.fail(self, error)
        self.inner.fail(error)

    def check_peers(self) -> None:
        Group.check_peers(self)
        self.inner.check_peers()

    def recover(self, timeout: float | None = None) -> None:
        """Recover the inner group; operations in flight have failed with it."""
        super().recover(timeout)
        self.failure = None

    def close(self, timeout: float = 5.0) -> None:
        """Let operations in flight here finish, then close the inner group."""
        Group.close(self, timeout)

    def _release(self) -> None:
        # What was in flight has had its time. This comes first: a step that is still in flight would block the worker thread.
        self._close_part(self.inner)
        self._worker_finalizer()


class _Passed(Work):
    """An operation that passes through a group that orders streams: to wait for it orders the current stream."""

    inner: Work | None = None

    def wait_settled(self, limit: float) -> bool:
        return super().wait_settled(limit) if self.inner is None else self.inner.wait_settled(limit)


class Verified(TrackedWrapper):
    """All ranks compare kind, shape, dtype, reduction, root and label before an operation's bytes move.

    A mismatch raises CollectiveMismatch on every rank, with the ranks that disagree and what each submitted.
    On the wire: 32 bytes per rank and operation; full descriptions are sent only when they differ.
    """

    tells_mismatch = True

    def program(self, op: Collective) -> Program:
        signature = op.signature
        described = encode(signature)
        digest = hashlib.sha256(repr(comparable(signature)).encode()).digest()[:_DIGEST_BYTES]
        mine = _tensor(digest + len(described).to_bytes(8, "little"))
        gathered = torch.empty(self.size * mine.numel(), dtype=torch.uint8, device="cpu")
        yield all_gather_into_tensor(gathered, mine, label=f"verify {op.kind.value}")
        digests = [bytes(part.tolist()) for part in gathered.view(self.size, -1)]
        if any(d[:_DIGEST_BYTES] != digest for d in digests):
            lengths = [int.from_bytes(d[_DIGEST_BYTES:], "little") for d in digests]
            places = [torch.empty(n, dtype=torch.uint8, device="cpu") for n in lengths]
            yield all_gather(places, _tensor(described), label="compare signatures")
            signatures = [decode(bytes(place.tolist()), rank=rank) for rank, place in enumerate(places)]
            raise mismatch(self.name, signatures) or CollectiveMismatch(
                f"{op} of {self.name}: it differs between ranks, in a tensor beyond those that the description covers. "
                "All ranks must submit the same collectives in the same order.",
                ops=dict(enumerate(signatures)),
            )
        yield op


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class NanCheck(TrackedWrapper):
    """Raises NonFiniteGradient on all ranks, with the rank and the operation's label, if a rank contributes NaN or infinity, and if
    the reduction of finite inputs is not finite. On the wire: one byte per rank and operation."""

    def submit(self, op: Collective) -> Work:
        """A send is checked on this rank only; collectives are checked on all ranks."""
        if op.kind is OpKind.SEND and not all(map(is_finite, op.inputs)):
            raise self._error(op, [self.rank])
        return super().submit(op)

    def program(self, op: Collective) -> Program:
        contributes = op.root is None or op.kind not in (OpKind.BROADCAST, OpKind.SCATTER) or op.root == self.rank
        if op.tensors and (op.tensors[0].dtype.is_floating_point or op.tensors[0].dtype.is_complex):
            bad = contributes and not all(map(is_finite, op.inputs))
            flags = torch.empty(self.size, dtype=torch.uint8, device="cpu")
            yield all_gather_into_tensor(flags, torch.tensor([bad], dtype=torch.uint8, device="cpu"), label="finite?")
            culprits = flags.nonzero().flatten().tolist()
            if culprits:
                raise self._error(op, culprits)
        yield op
        sums = op.kind in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_TENSOR)
        if sums and not all(map(is_finite, op.outputs)):
            text = f"{op} of {self.name}: every rank's values were finite, but the result is not"
            text += ". Scale down before the reduction, or reduce in a wider dtype."
            raise NonFiniteGradient(text, parameter=op.label or None, origin=Origin.OVERFLOW)

    def _error(self, op: Collective, ranks: list[int]) -> NonFiniteGradient:
        who = f"ranks {ranks}" if len(ranks) > 1 else f"rank {ranks[0]}"
        text = f"{op} of {self.name}: {who} contributed NaN or infinity. Check its batch, loss and learning rate."
        return NonFiniteGradient(text, rank=ranks[0], parameter=op.label or None, origin=Origin.GRADIENT)

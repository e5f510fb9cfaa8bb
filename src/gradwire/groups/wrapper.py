"""Groups around groups. `GroupWrapper` passes operations through; `BookedWrapper` says itself when they are over;
`ProgramWrapper` makes several of one.

A wrapper overrides `submit`, or `program`, and cannot forget the other verbs: they all end there.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout
from gradwire.collectives.lower import Program
from gradwire.errors import CollectiveTimeout, UsageError
from gradwire.groups.base import Group
from gradwire.groups.forked import finalize_here
from gradwire.groups.lane import Lane
from gradwire.groups.ledger import Arrivals
from gradwire.groups.work import Work


class _Around(Group):
    """What all wrappers hand on to the group inside."""

    inner: Group

    @property
    def tells_mismatch(self) -> bool:  # type: ignore[override]
        """As the inner group does."""
        return self.inner.tells_mismatch

    @property
    def in_one_process(self) -> bool:  # type: ignore[override]
        """As the inner group's ranks are."""
        return self.inner.in_one_process

    @property
    def layout(self) -> Layout | None:  # type: ignore[override]
        """As the inner group's ranks are."""
        return self.inner.layout

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """Memory of the inner group."""
        return self.inner.allocate(numel, dtype=dtype, device=device)

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """Split the inner group and wrap the part in the same way."""
        part = self.inner.split(color, key)
        return None if part is None else self.rewrap(part)

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        """A sub-group of the inner group, wrapped in the same way."""
        return self.rewrap(self.inner.subgroup(ranks, name=name))

    def set_timeout(self, timeout: float) -> None:
        """Of the inner group, too."""
        super().set_timeout(timeout)
        self.inner.set_timeout(timeout)

    def rewrap(self, inner: Group) -> Group:
        """The same wrapper around another group: what `split` returns. Override when the constructor takes more."""
        return type(self)(inner)  # type: ignore[call-arg, arg-type]


class GroupWrapper(_Around):
    """A group around another: override `submit`, inherit the rest. Shares the inner group's ledger and life."""

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.name = f"{type(self).__name__}({inner.name})"
        self.timeout = inner.timeout
        self.ledger = inner.ledger

    @property
    def failure(self) -> BaseException | None:  # type: ignore[override]
        """The inner group's."""
        return self.inner.failure

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """The inner group's."""
        return self.inner.closed

    def submit(self, op: Collective) -> Work:
        """Hand `op` to the inner group."""
        return self.inner.submit(op)

    def arrivals(self, work: Work) -> Arrivals | None:
        """As the inner group knows it."""
        return self.inner.arrivals(work)

    def abort(self, reason: str = "abort() was called") -> None:
        """Abort the inner group, which may know how to tell its peers."""
        self.inner.abort(reason)

    def orders_streams(self, device: torch.device) -> bool:
        """As the inner group does."""
        return self.inner.orders_streams(device)

    def check_peers(self) -> None:
        """As the inner group knows it."""
        self.inner.check_peers()

    def recover(self, timeout: float | None = None) -> None:
        """Recover the inner group."""
        self.inner.recover(timeout)

    def fail(self, error: BaseException) -> None:
        """Fail the inner group."""
        self.inner.fail(error)

    def close(self, timeout: float = 5.0) -> None:
        """Close the inner group."""
        self.inner.close(timeout)


class BookedWrapper(_Around):
    """A group around another that keeps its own books: hooks and listeners see the caller's operations, and when one is over
    is for the wrapper to say. Override `submit`: begin a Work, hand something to the inner group, note it in `steps`, and settle.
    """

    def __init__(self, inner: Group) -> None:
        super().__init__(inner.rank, inner.size, name=f"{type(self).__name__}({inner.name})", timeout=inner.timeout)
        self.inner = inner
        self.ledger.collect_hook_errors_of(inner.ledger)
        self.steps: dict[int, Work] = {}
        """What the inner group does just now for an operation, by the operation's number."""

    def standing(self, op: Collective) -> tuple[int, int]:
        """Refused: the steps of a program are of all ranks."""
        raise UsageError(
            f"{op} on {self}: only some ranks take part, and {type(self).__name__} asks all of them about every operation. Put it "
            f"around the parts instead: HierarchicalGroup({type(self).__name__}(inside), across)."
        )

    def check_usable(self, op: Collective) -> None:
        """Raise if this or the inner group is closed or has failed."""
        super().check_usable(op)
        self.inner.check_usable(op)

    def arrivals(self, work: Work) -> Arrivals | None:
        """Who has joined the step the operation is at."""
        step = self.steps.get(work.seq)
        if step is None:
            return None
        # A group may forget who was missing once it has given a step up: what it knew then is in the error.
        late = step.exception()
        if isinstance(late, CollectiveTimeout) and late.joined is not None and late.missing is not None:
            return Arrivals(tuple(late.joined), tuple(late.missing))
        return self.inner.arrivals(step)

    def late(self, work: Work, error: CollectiveTimeout) -> CollectiveTimeout:
        """The inner group's time-out in the caller's words: the step's name says nothing to him; whom it misses is the same."""
        mine = self.ledger.timed_out(work, work.timeout)
        # Without its traceback, whose frames hold the inner group, and its memory, as long as anybody keeps the error.
        mine.__cause__ = error.with_traceback(None)
        return mine

    def abort(self, reason: str = "abort() was called") -> None:
        """Abort the inner group, and with it what is in flight here."""
        self.inner.abort(reason)
        super().abort(reason)

    def check_peers(self) -> None:
        """As the inner group knows it."""
        super().check_peers()
        self.inner.check_peers()

    def recover(self, timeout: float | None = None) -> None:
        """Recover the inner group; what was under way has failed with it."""
        self.inner.recover(timeout)
        self.failure = None

    def fail(self, error: BaseException) -> None:
        """Fail both."""
        super().fail(error)
        self.inner.fail(error)

    def _release(self) -> None:
        # What was in flight has had its time.
        self._close_part(self.inner)


class ProgramWrapper(BookedWrapper):
    """A group that makes a program of every collective: several operations of the inner group, one after another.

    Programs run on a lane, in submission order, so `submit` never blocks and all ranks' steps come in the same order. Sends and
    receives concern two ranks only; they pass through.
    """

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self._lane = Lane(f"{self.name}-{self.rank}")
        self._order = threading.Lock()
        self._lane_finalizer = finalize_here(self, self._lane.stop, 2.0)

    @abstractmethod
    def program(self, op: Collective) -> Program:
        """Yield the inner group's operations that make up `op`; raise to fail it."""

    def submit(self, op: Collective) -> Work:
        """Put the operation's program on the lane."""
        if op.kind.is_p2p:
            return self._pass_through(op)
        with self._order:
            work = self.begin(op)
            self._lane.put(lambda: self._run(work))
        return work

    def _pass_through(self, op: Collective) -> Work:
        work = self.begin(op)

        def settle(inner: Work) -> None:
            error = inner.exception()
            if error is None:
                work.finish(source_rank=inner._source)
            else:
                work.fail(error)

        try:
            self.inner.submit(op).add_done_callback(settle)
        except Exception as error:
            work.fail(error)
        return work

    def _run(self, work: Work) -> None:
        program = self.program(work.op)
        work.ledger.started(work, time.perf_counter())
        try:
            for step in program:
                left = work.deadline - time.perf_counter()
                if left <= 0:
                    self.ledger.expire(work)
                if work.is_completed():
                    return
                self.steps[work.seq] = inner = self.inner.submit(step.within(left))
                inner.wait_done()
            work.finish()
        except CollectiveTimeout as error:
            work.fail(self.late(work, error))
        except BaseException as error:  # also SystemExit: the lane is needed again
            work.fail(error)
        finally:
            program.close()
            self.steps.pop(work.seq, None)

    def _release(self) -> None:
        super()._release()  # first: a step that is still in flight would hold the lane
        self._lane_finalizer()

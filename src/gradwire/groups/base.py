"""`Group`: who takes part, and one verb. A group of your own implements `submit` and inherits everything else.

`submit(op)` calls `self.begin(op)`, which checks the operation, numbers it, announces it and returns its Work; then it moves
the bytes its own way, and settles the Work with `work.finish()` or `work.fail(error)`, at once or later, from any thread.
Deadlines, completion hooks, events, `abort`, `close` and torch.distributed's method names come with the base class.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar, overload

import torch
from torch import Tensor

from gradwire.collectives import Collective, Layout, Scope, build
from gradwire.collectives.timeouts import timeout_seconds, wait_seconds
from gradwire.errors import ClosedError, GroupAborted, HookError, NoSubgroups, PeerLost, UsageError, again
from gradwire.events import Emitter, Handle
from gradwire.groups.completion import CompletionHook
from gradwire.groups.failure.watchdog import Watchdog
from gradwire.groups.forked import finalize_here, refuse_in_child
from gradwire.groups.ledger import Arrivals, Ledger
from gradwire.groups.verbs import Verbs
from gradwire.groups.work import Work
from gradwire.recorder.source import derived_id
from gradwire.runtime.threads import weakly

DEFAULT_TIMEOUT = 1800.0
"""Seconds until an operation fails, by default: torch.distributed's default for CPU backends."""
MEETING_TIMEOUT = 300.0
"""Seconds within which all ranks must have called `gw.init()`: the default of torch's stores."""

W = TypeVar("W", bound=Work)


class Group(Verbs, ABC):
    """Ranks that communicate. Submit from one thread, or agree on an order: the n-th collectives of all ranks meet."""

    tells_mismatch: bool = False
    """Whether ranks that submit different collectives get CollectiveMismatch. Engines that do not check may hang, mix up data or,
    as gloo does on different sizes, crash the process; the `Verified` wrapper adds the check to any group."""

    identifies_itself: bool = False
    """Whether the constructor calls `ledger.identify` with what only the ranks of this group share, for records."""

    in_one_process: bool = False
    """Whether all ranks are threads of this process, which share its autograd engine."""

    layout: Layout | None = None
    """Which ranks share a host, if the group knows hosts and accepts collectives whose scope is not all ranks."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        name: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        watchdog: Watchdog | None = None,
        wraps: Group | None = None,
    ) -> None:
        """`watchdog` may be shared by several groups of a process. `wraps` is a group whose ledger this one shares; threads and
        queues then belong to that group and end with it."""
        if not 0 <= rank < size:
            raise UsageError(f"{type(self).__name__}: rank {rank} of size {size}. Ranks count from 0 to size - 1.")
        self.rank = rank
        self.size = size
        self.name = name or type(self).__name__
        self.timeout = timeout_seconds(type(self).__name__, timeout) if wraps is None else timeout
        self._splits = 0
        self.ledger: Ledger
        self._watchdog: Watchdog
        if wraps is not None:
            self.ledger, self._watchdog = wraps.ledger, wraps._watchdog
            return
        self.ledger = Ledger(name=self.name, rank=rank, size=size, kind=type(self).__name__)
        if not self.identifies_itself:
            self.ledger.identify(None)
        self.ledger.arrivals = weakly(self.arrivals)
        self._watchdog = watchdog or Watchdog(f"{self.name}-{rank}")
        self._watchdog.watch(self.ledger)
        # Runs at interpreter exit too: daemon threads must not be running when the interpreter shuts down.
        self._finalizer = finalize_here(self, _stop, self._watchdog, self.ledger)

    @abstractmethod
    def submit(self, op: Collective) -> Work:
        """Start `op` and return its Work without waiting for other ranks."""

    @overload
    def begin(self, op: Collective) -> Work: ...
    @overload
    def begin(self, op: Collective, work_type: type[W]) -> W: ...
    def begin(self, op: Collective, work_type: type[Work] = Work) -> Work:
        """Check, number and announce `op`: the first line of every `submit`. The Work is then in flight."""
        self.check_usable(op)
        op.check(*((self.rank, self.size) if op.scope is Scope.WORLD else self.standing(op)))
        timeout = self.timeout if op.timeout is None else min(self.timeout, op.timeout)
        work = work_type(op, self.ledger, seq=self.ledger.next_seq(), timeout=timeout)
        work.group = self
        try:
            self.ledger.submitted(work)
        except BaseException as error:  # from a listener, in the main thread: the operation will never run
            work.fail(error)
            raise
        failure = self.ledger.failure
        if failure is not None:  # aborted since the check above, perhaps before the operation was in the ledger
            work.fail(failure)
        if not self._watchdog.running:
            self._watchdog.wake()
        return work

    def check_usable(self, op: Collective) -> None:
        """Raise if the group was closed, has failed or belongs to another process. (The next wait raises a hook's error.)"""
        if self.forked:
            self.refuse_in_child(str(op))
        ledger = self.ledger
        if ledger.closed:
            raise ClosedError(f"{op} on {self}: the group is closed. Submit before close().")
        if ledger.failure is not None:
            raise again(ledger.failure)

    @property
    def failure(self) -> BaseException | None:
        """The error that the group has failed with: all operations in flight have failed with it, and new ones are refused."""
        return self.ledger.failure

    @failure.setter
    def failure(self, error: BaseException | None) -> None:
        if "ledger" in self.__dict__:  # else a subclass sets it before it calls __init__
            if error is None and self.ledger.failure is not None:
                self.ledger.recovered()
            self.ledger.failure = error

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self.ledger.closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        if "ledger" in self.__dict__:  # else a subclass sets it before it calls __init__
            self.ledger.closed = closed

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one that made the group."""
        return os.getpid() != self.ledger.pid

    def refuse_in_child(self, what: str) -> None:
        """Raise UsageError in a forked child."""
        refuse_in_child(self.ledger.pid, what, "on", self)

    def standing(self, op: Collective) -> tuple[int, int]:
        """(this rank's index, their number) among the ranks that take part in `op`, whose scope is not all ranks."""
        raise UsageError(
            f"{op} on {self}: the group does not know which ranks share a host. Submit it to a HierarchicalGroup, or "
            "without a scope."
        )

    def set_timeout(self, timeout: float) -> None:
        """Set the timeout, in seconds, of operations submitted from now on."""
        self.timeout = timeout_seconds(f"set_timeout of {self}", timeout)

    def orders_streams(self, device: torch.device) -> bool:
        """Whether `wait` on tensors of `device` only orders its current stream and does not block the host, as with NCCL."""
        return False

    def allocate(self, numel: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        """A flat tensor in the memory that this group communicates fastest. Its contents are undefined."""
        return torch.empty(numel, dtype=dtype, device=device)

    def split(self, color: int | None, key: int | None = None) -> Group | None:
        """Split the group: ranks that pass the same `color` form a new group, ordered by `key`, then by rank. Every rank must call
        it; a rank that passes None joins no new group and gets None."""
        if color is not None and color < 0:
            raise UsageError(f"split of {self}: color {color} is negative. Colors count from 0; None joins no group.")
        numbers = [-1 if color is None else color, self.rank if key is None else key]
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        gathered = torch.empty(self.size * 2, dtype=torch.int64, device="cpu")
        work = self.submit(build.all_gather_into_tensor(gathered, mine, label="split"))
        # Counted only once submitted: a call that was refused here has not happened on the other ranks either.
        number = self._splits
        self._splits += 1
        work.wait_done()  # not wait(): a rank whose completion hook has raised must still make the subgroup with the others
        table = gathered.view(self.size, 2).tolist()
        if color is None:
            return None
        ranks = [r for _, r in sorted((table[r][1], r) for r in range(self.size) if table[r][0] == color)]
        part = self.subgroup(ranks, name=f"{self.name}/{number}.{color}")
        part.ledger.identify(derived_id(self.ledger.events.group_id, number, color))
        return part

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        """A group of these `ranks` of this group, in this order. `split` calls it on each of them at the same point."""
        raise NoSubgroups(f"{type(self).__name__} does not make subgroups. Override subgroup(ranks, name=...).")

    def arrivals(self, work: Work) -> Arrivals | None:
        """Which ranks have joined `work`, if the group can know: timeouts name the missing ones."""
        return None if work.op.peer is None else Arrivals((self.rank,), (work.op.peer,))

    @property
    def events(self) -> Emitter:
        """The typed events of this group: `group.events.listen(fn)`."""
        return self.ledger.events

    def on_completion(self, fn: CompletionHook) -> Handle:
        """Call `fn(info)` once per finished operation, in completion order, on a thread of its own, with a queue without limit."""
        return self.ledger.hooks.add(fn)

    def flush_completions(self, timeout: float = 10.0) -> bool:
        """Wait until completion hooks have been called for everything that has finished. False on timeout."""
        return self.ledger.hooks.flush(wait_seconds(f"flush_completions of {self}", timeout))

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail everything in flight, and every later submit, with GroupAborted. Never waits; may be called from any thread."""
        self.fail(GroupAborted(f"{self} was aborted: {reason}", reason=reason))

    def abort_device(self) -> None:
        """Once aborted, end also what devices run of this group, for good. May take a second."""

    def check_peers(self) -> None:
        """Check now whether the group has failed, here or on another rank, and raise the error."""
        self.refuse_in_child("check_peers()")
        if self.failure is None and not self.closed:
            self._look_at_peers()
        if self.failure is not None:
            raise again(self.failure)

    def _look_at_peers(self) -> None:
        """Fail if another rank has failed, as far as this one can find out now."""

    def recover(self, timeout: float | None = None) -> None:
        """Make an aborted group usable again. Every rank calls it; operations in flight are lost. Raises the group's failure if it
        is permanent: a lost peer stays lost."""
        self._recovery_limit(timeout)
        if self.failure is not None:
            raise again(self.failure)

    def _recovery_limit(self, timeout: float | None) -> float:
        """How many seconds a recovery may take. Refused in a forked child, and when a rank is lost."""
        self.refuse_in_child("recover()")
        limit = self.timeout if timeout is None else timeout_seconds(f"recover of {self}", timeout)
        if isinstance(self.failure, PeerLost):
            raise again(self.failure)
        return limit

    def fail(self, error: BaseException) -> None:
        """Like `abort`, with the given error. The first failure is kept."""
        if self.forked:
            return
        if self.failure is None:
            self.failure = error
        self.ledger.fail_all(self.failure)

    def close(self, timeout: float = 5.0) -> None:
        """Leave gracefully: let operations in flight finish, for at most `timeout` seconds, call the hooks, end the threads. What
        has not finished by then fails with ClosedError; an error of a completion hook that no wait has raised yet is raised here.
        Closing twice is a no-op, as is closing in a forked child: the group belongs to its parent."""
        timeout = wait_seconds(f"close of {self}", timeout)
        if self.closed or self.forked:
            return
        self.ledger.closed = True
        deadline = time.perf_counter() + timeout
        for work in list(self.ledger.pending.values()):
            work.wait_settled(max(0.0, min(deadline, work.deadline) - time.perf_counter()))
        self.ledger.fail_all(ClosedError(f"{self} was closed with the operation in flight for {timeout:.3g} s more."))
        self._release()
        self._finalizer()
        if self.ledger.hook_errors:
            self.ledger.raise_hook_error()

    def _release(self) -> None:
        """Release what the group holds (sockets, threads, memory), when it is closed."""

    def _close_part(self, part: Group) -> None:
        """Close a group that this one is made of. An error of its completion hooks is raised by this group's `close`."""
        try:
            part.close(0.0)
        except HookError as error:
            self.ledger.hook_errors.append(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def __repr__(self) -> str:
        alive = "failed" if self.failure is not None else f"{len(self.ledger.pending)} in flight"
        state = "closed" if self.closed else alive
        return f"<{self.name} rank {self.rank} of {self.size}, {state}>"


BuildGroup = Callable[..., Group]
"""`build(store, rank, size, *, timeout, name)` makes one rank's group. All ranks meet in `store`, which no other group uses."""


def _stop(watchdog: Watchdog, ledger: Ledger) -> None:
    watchdog.stop()
    ledger.futures.stop(timeout=5.0)
    ledger.hooks.stop(timeout=5.0)

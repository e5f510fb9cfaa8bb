"""`TorchWork`: a torch.distributed.Work over gradwire's Work, so that torch can wait for a gradwire group.

Note [Who keeps a Work alive]
c10d's C++ finds the methods of a Work written in Python only while the Python object lives. torch keeps a reference, except to
the count of active ranks in `DistributedDataParallel.join`, which Python passes to the C++ reducer and drops; C++ would then wait
forever. So a small Work that is dropped before anyone has waited for it is kept by its process group, one of the last `KEPT`.

Note [Errors in futures]
torch 2.13's reducer takes an exception in a future, `set_exception`, for a list of tensors and crashes. So a future returned here
also fails in C++, at the price of the type: `get_future().wait()` raises RuntimeError with our message in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from gradwire.collectives import OpKind
from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups.completion import WorkInfo
from gradwire.groups.work import Work, seconds
from gradwire.runtime.dynamo import untraced

KEPT, _SMALL = 64, 4096

OpType: Any = c10d.OpType  # type: ignore[attr-defined]  # torch's stubs leave both out
WorkResult: Any = c10d.WorkResult  # type: ignore[attr-defined]

NAMES = {kind: kind.name for kind in OpKind} | {
    OpKind.ALL_REDUCE: "ALLREDUCE",
    OpKind.ALL_GATHER: "ALLGATHER",
    OpKind.ALL_GATHER_INTO_TENSOR: "ALLGATHER_BASE",
    OpKind.REDUCE_SCATTER_TENSOR: "REDUCE_SCATTER_BASE",
    OpKind.ALL_TO_ALL: "ALLTOALL",
    OpKind.ALL_TO_ALL_SINGLE: "ALLTOALL_BASE",
}
"""c10d's names; two of them are private in its OpType."""
_OP_TYPES = {kind: getattr(OpType, name if hasattr(OpType, name) else f"_{name}") for kind, name in NAMES.items()}


@untraced
class TorchWork(dist.Work):
    """One or more gradwire Works as one Work of torch. Completed when all are; failed if one has failed."""

    def __init__(self, *works: Work, dropped: deque[TorchWork] | None = None) -> None:
        """`dropped` keeps it if nothing has waited for it when its last reference goes: see Note [Who keeps a Work alive]."""
        super().__init__()
        self.works = works
        small = dropped is not None and sum(work.op.nbytes for work in works) <= _SMALL
        self._dropped = dropped if small else None
        self._future: torch.futures.Future[Any] | None = None

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped.append(self)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Return True once the outputs may be used; raise the error if it failed. Zero means the operation's own timeout."""
        limit, self._dropped = seconds(timeout), None
        until = None if limit is None else time.perf_counter() + limit
        for work in self.works:
            work.wait(None if until is None else max(0.0, until - time.perf_counter()))
        return True

    def synchronize(self) -> None:
        """Make later work on the current stream wait for the outputs. The host waits if the engine has no streams."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def exception(self) -> BaseException | None:
        """The error it failed with; None while it runs and after success."""
        return next((error for work in self.works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        return [t for work in self.works for t in work.result()]

    def source_rank(self) -> int:
        """The sender of a finished receive."""
        if len(self.works) != 1:
            raise UsageError(f"source_rank of {len(self.works)} operations: only one receive has a source.")
        return self.works[0].source_rank()

    _source_rank = source_rank

    def _get_duration(self) -> float:
        """Milliseconds from submission to completion, as c10d counts."""
        durations = [work.duration for work in self.works]
        if any(duration is None for duration in durations):
            raise UsageError(f"duration of {self!r}: it is still running. Wait for it first.")
        return 1000.0 * max((duration or 0.0 for duration in durations), default=0.0)

    def _get_sequence_number(self) -> int:
        return self.works[0].seq if self.works else 0

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=max((work.timeout for work in self.works), default=0.0))

    def _get_op_type(self) -> int:
        kinds = {work.op.kind for work in self.works}
        return int(_OP_TYPES[kinds.pop()] if len(self.works) == 1 else OpType.COALESCED)

    def get_future(self) -> torch.futures.Future[Any]:
        """A Future of the list of outputs, completed by then if the operation is. See Note [Errors in futures]."""
        self._dropped = None
        if self._future is None:
            futures = [work.get_future() for work in self.works]
            self._future = (
                futures[0].then(_value) if len(futures) == 1 else torch.futures.collect_all(futures).then(_values)
            )
        if self.is_completed() and not self._future.done():  # C++ may take the value without another wait
            for work in self.works:
                work.get_future()
            with suppress(Exception):
                self._future.wait()  # another thread may be completing it
        return self._future

    def get_future_result(self) -> torch.futures.Future[int]:
        """A Future of a WorkResult as a number. It never fails: its value is how the operation ended."""
        return torch.futures.collect_all([work.get_future() for work in self.works]).then(self._work_result)

    def _work_result(self, _: object) -> int:
        error = self.exception()
        if error is None:
            return int(WorkResult.SUCCESS)
        if isinstance(error, CollectiveTimeout):
            return int(WorkResult.TIMEOUT)
        return int(WorkResult.COMM_ERROR if isinstance(error, GroupError) else WorkResult.UNKNOWN)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(repr(work) for work in self.works)}>"


def _value(future: torch.futures.Future[Any]) -> list[Tensor]:
    value: list[Tensor] = future.value()
    return value


def _values(future: torch.futures.Future[list[torch.futures.Future[Any]]]) -> list[Tensor]:
    return [t for part in future.value() for t in part.value()]


@dataclass(frozen=True, slots=True)
class C10dWorkInfo:
    """A finished operation under the names of c10d's WorkInfo, which Python cannot construct."""

    op_type: Any
    seq: int
    time_started: timedelta
    time_finished: timedelta
    active_duration: timedelta


def translate_hook(hook: Callable[[C10dWorkInfo], None]) -> Callable[[WorkInfo], None]:
    """A gradwire completion hook that calls a c10d one and has its name, for errors."""

    def call(info: WorkInfo) -> None:
        times = (timedelta(seconds=value) for value in (info.started, info.finished, info.duration))
        hook(C10dWorkInfo(_OP_TYPES[info.op.kind], info.seq, *times))

    call.__qualname__ = getattr(hook, "__qualname__", type(hook).__name__)
    return call

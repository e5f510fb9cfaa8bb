"""Adapts what a process group written in Python returns to the interface of c10d's Work.

Note [Work written in Python]
Such a group returns a C++ Work of torch (from an engine it delegates to, or `_create_work_from_future(future)`, which cannot be
waited for with a timeout and does not raise the error in its future), or an object with `wait(timeout)` and `get_future()`, the two
methods that torch calls, or with `wait` alone. torch's base class cannot report for any of them whether they are done.
A future reports its own completion, so it is used first; then `wait` is called, which may write the result. Without a future a
thread calls `wait`, with the operation's deadline. DDP's reducer takes the result of an all-reduce from the future, not from the
tensors it passed in; so do we where they differ.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.reference import store
from gradwire.errors import UsageTypeError


def adapt(work: Any, op: Collective, method: str, timeout: float) -> Any:
    """What `method` returned for `op`, with a repeatable `wait(timeout)`, a reliable `is_completed`, and errors."""
    if type(work) is dist.Work:
        return _CppWork(work, op)
    waits, has_future = (callable(_own(work, name)) for name in ("wait", "get_future"))
    if not waits and not has_future:
        raise UsageTypeError(
            f"{op}: {method} returned {work!r}, which is not a Work. Return a subclass of torch.distributed.Work with wait and "
            "get_future, or _create_work_from_future(future)."
        )
    return PythonWork(op, work if waits else None, work.get_future() if has_future else None, timeout)


def _wait(work: Any, timeout: timedelta) -> None:
    """C++ passes a timeout, Python's `dist` does not: some implementations require one, and some do not accept any."""
    try:
        inspect.signature(work.wait).bind(timeout)
    except TypeError:
        work.wait()
    else:
        work.wait(timeout)


def _own(work: Any, name: str) -> Any:
    """A method that is not inherited from torch's base class, whose own does nothing useful in Python."""
    inherited = isinstance(work, dist.Work) and getattr(type(work), name, None) is getattr(dist.Work, name)
    return None if inherited else getattr(work, name, None)


class _CppWork:
    """A C++ Work of torch. See Note [Work written in Python]."""

    def __init__(self, work: Any, op: Collective) -> None:
        self._work = work
        self._op = op
        self._wrapped: PythonWork | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._wrapped is None:
            try:
                return bool(self._work.wait() if timeout is None else self._work.wait(timeout))
            except RuntimeError as error:
                if "finite timeout not implemented" not in str(error):
                    raise
            self._wrapped = PythonWork(self._op, None, self._work.get_future(), 0.0)
        return self._wrapped.wait(timeout)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


class PythonWork:
    """Done when its future is, or, without one, when its `wait` has returned in a thread. No C++ engine waits for it."""

    def __init__(self, op: Collective, work: Any, future: Any, timeout: float) -> None:
        self._op = op
        self._work = work
        self._future = future
        self._timeout = timedelta(seconds=timeout)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._taken = False
        self._source = -1
        self._error: BaseException | None = None
        if future is None:
            threading.Thread(target=self._call_wait, name=f"gradwire-wait-{op.kind.value}", daemon=True).start()
        else:
            over = self._over
            future.add_done_callback(lambda _: over.set())

    def _call_wait(self) -> None:
        try:
            _wait(self._work, self._timeout)
            if self._op.device.type == "cuda":
                torch.cuda.current_stream(self._op.device).synchronize()
        except BaseException as error:  # SystemExit would silently end the thread
            self._error = error
        self._over.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raise the error it failed with, or, like c10d, RuntimeError if it is not done in time."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"{self._op}: still running after {timeout}")
        with self._lock:
            if not self._taken:
                self._taken = True
                try:
                    self._take_result()
                except BaseException as error:
                    self._error = error
                # An error's traceback holds this object, which holds the error: the cycle must not keep the group's engine alive.
                self._work = self._future = None
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def _take_result(self) -> None:
        """Write the result to the outputs, or raise the error."""
        if self._future is not None:
            if self._work is not None:
                _wait(self._work, self._timeout)
            value = self._future.wait()
            if isinstance(value, BaseException):  # what set_exception stores, once the future has passed through C++
                raise value
            if self._op.kind is OpKind.ALL_REDUCE:
                _take(value, self._op.outputs)
        if self._error is None and self._op.kind is OpKind.RECV and self._op.peer is None:
            self._source = int(self._work._source_rank())

    def _source_rank(self) -> int:
        return self._source


def _take(value: Any, outputs: tuple[Tensor, ...]) -> None:
    """Take the result as DDP's reducer does: from the future, unless it holds the output tensors themselves."""
    results = [value] if isinstance(value, Tensor) else value
    if not isinstance(results, Sequence) or len(results) != len(outputs):
        return
    for result, output in zip(results, outputs, strict=True):
        if isinstance(result, Tensor) and result.numel() == output.numel() and result.data_ptr() != output.data_ptr():
            store(output.detach(), result)

"""What the pool and its workers exchange: jobs, messages, results, and how they are pickled; and the time limits of the pool."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
from torch._C._distributed_c10d import Store

from gradwire.errors import GroupError, UsageTypeError
from gradwire.groups import Group
from gradwire.groups.base import BuildGroup

START_LIMIT = 120.0
"""Seconds that new workers have to import torch and report."""
ABORT_GRACE = 5.0
"""Seconds that ranks have to stop after another has failed; then they are killed."""
GROUP_MARGIN = 5.0
"""Seconds by which a group's own timeout is longer than the run's, whose error shows every rank's stack."""
CLOSE_LIMIT = 30.0
"""Seconds that ranks have to close their groups and clean up once all have answered."""
LEFTOVER_GRACE = 3.0
"""Seconds that a rank's leftovers may take to disappear by themselves."""
MESSAGE_LIMIT = 30.0
"""Seconds within which a partly received message must make progress."""
TURN_LIMIT = 900.0
"""Seconds that a call waits for the calls of other threads on the same pool."""


class Fate(Enum):
    """How a rank ended."""

    RETURNED = "its function returned"
    RAISED = "its function, or closing its group, raised; or it left something behind"
    DIED = "its process ended by itself"
    STUCK = "it had not finished when its time was up"


class LeftBehind(Enum):
    """What to do about threads, processes, sockets and descriptors that a rank's function leaves behind.

    In either case the rank's process is not reused.
    """

    IGNORE = "ignore"
    """Ignore them: a function may leave things that end with its process."""
    RAISE = "raise"
    """Raise InternalError, which names each: for tests of code that must clean up after itself."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """The outcome of one rank, and when it ended (on `time.monotonic`'s clock, which the processes of a host share).

    `detail` is how a process died, or the stack of a rank that was stuck.
    """

    rank: int
    fate: Fate
    value: Any = None
    error: BaseException | None = None
    detail: str = ""
    when: float = field(default_factory=time.monotonic)

    def failed(self, lost: Collection[int]) -> bool:
        """Whether this is a failure, given that the ranks in `lost` are expected to die."""
        return self.fate is not (Fate.DIED if self.rank in lost else Fate.RETURNED)


class RemoteTraceback(Exception):
    """The `__cause__` of an error from another process: prints as the traceback it had there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, slots=True)
class JobContext:
    """One rank of a job."""

    rank: int
    size: int
    name: str
    timeout: float
    """Seconds that the job may take; or, if ranks report progress, that it may take without a report."""
    store: Store
    """Where the ranks of this job meet."""
    own: Callable[[Any], None]
    """From now on call `abort(reason)` if a rank fails, and `close()` at the end, of this, e.g. a group; None for nothing."""
    report: Callable[[Any], None]
    """Send progress to the process that runs the job."""


@dataclass(frozen=True, slots=True)
class GroupJob:
    """Run `fn(wrap(build(...)))`."""

    fn: Callable[[Group], object]
    build: BuildGroup
    wrap: Callable[[Group], Group] | None = None

    def __call__(self, context: JobContext) -> object:
        timeout = context.timeout + GROUP_MARGIN
        group = self.build(context.store, context.rank, context.size, timeout=timeout, name=context.name)
        context.own(group)
        if self.wrap is not None:
            group = self.wrap(group)
            context.own(group)
        return self.fn(group)

    def __repr__(self) -> str:
        return repr(self.fn)


# -- messages --------------------------------------------------------------------------------------------------------------
# The first message of a worker is the tuple of the paths that it imports from.


class RankJob(NamedTuple):
    """Parent: be this rank. `blob` holds a function of a `JobContext`, which may import from `path` too."""

    rank: int
    size: int
    name: str
    timeout: float
    blob: bytes
    path: str


class Finish(NamedTuple):
    """Parent: all ranks have answered, so close your group; or, with a `failure` of another rank, abort it."""

    failure: str = ""


class ProgressReport(NamedTuple):
    """Worker: progress."""

    progress: Any


class Answer(NamedTuple):
    """Worker: a pickled RankResult, and the traceback of its error."""

    blob: bytes
    text: str


class Ended(NamedTuple):
    """Worker: my group is closed. With the error of closing it, and the leftovers."""

    error: Answer | None
    left: tuple[str, ...]


def send(sock: socket.socket, message: object) -> None:
    """Write one message."""
    data = pickle.dumps(message)
    sock.sendall(len(data).to_bytes(8, "little") + data)


def receive(sock: socket.socket) -> Any:
    """Read one message; EOFError or OSError when the other side is gone."""
    return pickle.loads(_exactly(sock, int.from_bytes(_exactly(sock, 8), "little")))


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, done = memoryview(data), 0
    while done < count:
        got = sock.recv_into(view[done:])
        if not got:
            raise EOFError("the other side has closed the connection")
        done += got
    return data


class _Shipper(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value what the workers could not import: functions, classes and modules of tests, scripts, notebooks.

    A module counts as importable there if its top-level package is directly in one of the paths that the workers import from.
    They do not search the current directory, so a test module never is, however pytest has loaded it.
    """

    def __init__(self, file: io.BytesIO, paths: Collection[str]) -> None:
        super().__init__(file)
        self._paths = paths
        self.registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        """As in cloudpickle, after registering the object's module."""
        if isinstance(obj, types.ModuleType):
            if self._importable(obj):
                return importlib.import_module, (obj.__name__,)
            # Loader and spec may lead to all of pytest; a module made by value needs neither.
            state = {k: v for k, v in vars(obj).items() if k not in ("__builtins__", "__loader__", "__spec__")}
            return types.ModuleType, (obj.__name__,), state
        if isinstance(obj, (types.FunctionType, type)):
            module = sys.modules.get(obj.__module__ or "")
            by_value = cloudpickle.list_registry_pickle_by_value()
            if module is not None and module.__name__ not in by_value and not self._importable(module):
                cloudpickle.register_pickle_by_value(module)
                self.registered.append(module)
        return super().reducer_override(obj)

    def _importable(self, module: types.ModuleType) -> bool:
        top = module.__name__.partition(".")[0]
        package = sys.modules.get(top, module)
        places = list(getattr(package, "__path__", ())) or [getattr(package, "__file__", None)]
        return top in sys.stdlib_module_names or any(
            os.path.dirname(os.path.realpath(place)) in self._paths for place in places if place
        )


def ship(value: object, paths: Collection[str]) -> bytes:
    """Pickle `value` for workers that import from `paths`."""
    file = io.BytesIO()
    shipper = _Shipper(file, paths)
    try:
        shipper.dump(value)
    finally:
        for module in shipper.registered:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def pack(result: RankResult) -> Answer:
    """Pickle a result. A value or an error that cannot be pickled is replaced by an error that describes it."""
    rank, value, error = result.rank, result.value, result.error
    text = "" if error is None else "".join(traceback.format_exception(error))
    try:
        blob = cloudpickle.dumps(result)
        if error is not None:
            cloudpickle.loads(blob)
        return Answer(blob, text)
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}"
    if error is None:
        replacement: Exception = UsageTypeError(
            f"rank {rank} returned a {type(value).__qualname__} that cannot be sent to another process: {why}. "
            "Return tensors, numbers, strings, or containers of them."
        )
    else:
        replacement = GroupError(
            f"rank {rank} raised {type(error).__qualname__}: {error}. The exception itself cannot be sent to another "
            f"process ({why}), so this replaces it; its traceback is the cause. "
            "Keep what cannot be pickled out of its arguments, or define __reduce__."
        )
    return Answer(cloudpickle.dumps(RankResult(rank, Fate.RAISED, error=replacement, when=result.when)), text)


def unpack(rank: int, answer: Answer) -> RankResult:
    """Unpickle a result. The cause of an error is its traceback on the rank."""
    try:
        result: RankResult = cloudpickle.loads(answer.blob)
    except Exception as problem:
        error = UsageTypeError(
            f"what rank {rank} returned or raised cannot be rebuilt in this process: {type(problem).__name__}: {problem}. "
            "Return tensors, numbers, strings, or containers of them."
        )
        result = RankResult(rank, Fate.RAISED, error=error)
    if result.error is not None and answer.text:
        result.error.__cause__ = RemoteTraceback(answer.text)
    return result

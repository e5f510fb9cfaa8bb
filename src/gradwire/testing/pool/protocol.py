"""What the pool and its workers exchange: jobs, messages, results; and the time limits of the pool."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from gradwire.errors import GroupAborted, PeerLost
from gradwire.groups import Group
from gradwire.groups.base import BuildGroup
from gradwire.runtime.rank_error import root_cause

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
    when: float
    value: Any = None
    error: BaseException | None = None
    detail: str = ""

    def failed(self, lost: Collection[int]) -> bool:
        """Whether this is a failure, given that the ranks in `lost` are expected to die."""
        return self.fate is not (Fate.DIED if self.rank in lost else Fate.RETURNED)


def root_failure(failures: Iterable[RankResult]) -> RankResult | None:
    """The failure that caused the others; None if all ranks that failed were stuck.

    Near the earliest, an error of the rank itself comes first, then a process that died, then PeerLost and GroupAborted, which look
    like consequences.
    """

    def consequence(outcome: RankResult) -> int:
        if outcome.fate is Fate.DIED:
            return 1
        return 2 if isinstance(outcome.error, (PeerLost, GroupAborted)) else 0

    active = (outcome for outcome in failures if outcome.fate is not Fate.STUCK)
    return root_cause(active, when=lambda outcome: outcome.when, consequence=consequence)


class RemoteTraceback(Exception):
    """The `__cause__` of an error from another process: prints as the traceback it had there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


# -- jobs ------------------------------------------------------------------------------------------------------------------


class Resource(Protocol):
    """What a job's rank must give up when the job ends, such as a group."""

    def abort(self, reason: str) -> None:
        """This rank or another one has failed: stop waiting."""

    def close(self) -> None:
        """All ranks have answered."""


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
    own: Callable[[Resource | None], None]
    """From now on abort and close this, instead of what was passed before."""
    report: Callable[[Any], None]
    """Send progress to the process that runs the job."""


@dataclass(frozen=True, slots=True)
class GroupJob:
    """Run `fn(wrap(build(...)))`."""

    fn: Callable[[Group], object]
    build: BuildGroup
    wrap: Callable[[Group], Group] | None = None

    def __call__(self, context: JobContext) -> object:
        """On one rank."""
        group = self.build(
            context.store, context.rank, context.size, timeout=context.timeout + GROUP_MARGIN, name=context.name
        )
        context.own(group)
        if self.wrap is not None:
            group = self.wrap(group)
            context.own(group)
        return self.fn(group)

    def __repr__(self) -> str:
        return repr(self.fn)


# -- messages --------------------------------------------------------------------------------------------------------------
# The first message of a worker is the tuple of the paths that it imports from.


@dataclass(frozen=True, slots=True)
class RankJob:
    """Parent: be this rank. `blob` holds a function of a `JobContext`, which may import from `path` too."""

    rank: int
    size: int
    name: str
    timeout: float
    blob: bytes
    path: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Parent: another rank has failed; stop."""

    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Parent: all ranks have answered; close your group."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Worker: progress."""

    progress: Any


@dataclass(frozen=True, slots=True)
class Returned:
    """Worker: the function returned this."""

    blob: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Worker: this was raised, with this traceback."""

    when: float
    blob: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Worker: my group is closed. With what closing it raised, and the leftovers."""

    raised: Raised | None
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

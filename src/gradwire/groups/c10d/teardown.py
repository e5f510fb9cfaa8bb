"""Ends engines of torch.distributed without leaving a thread inside them.

Note [The engine's threads and the interpreter's end]
A C++ thread that waits for the interpreter lock when the interpreter ends is unwound by force, which C++ answers with
"terminate called without an active exception": the program aborts although all is well. Two kinds of thread wait for it. A Python
thread inside a call of the engine, such as its destructor, which waits for the operations in it. And a worker thread of gloo's own:
it drops an operation's tensors after the operation counts as completed, and takes the lock if theirs was the last reference.

So when a group ends, and at interpreter exit, operations get a moment to finish. If some do not, gloo's connections are aborted,
which fails everything in them at once. Then no Python thread is inside, and the destructor, which joins gloo's threads, takes
milliseconds. An engine that is busy in spite of all that is not destroyed: a reference to it is leaked.

Note [Aborting gloo]
`ProcessGroupGloo.abort()` leaves operations where they are. But a receive that times out closes all connections of its engine, and
every operation fails with "Application timeout caused pair closure"; a receive with a tag that nobody uses always times out.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from gradwire.concurrency import Worker
from gradwire.groups.c10d.engine import Engine
from gradwire.groups.c10d.messages import MessageThreads
from gradwire.groups.c10d.python_work import PythonOutcome
from gradwire.groups.c10d.work import C10dWork, CompletionPoller
from gradwire.groups.ledger import Ledger

_UNUSED_TAG = 2**31 - 1
_MOMENT = 0.5
"""Seconds that operations in the engine get to finish when the group ends."""
_PAUSE = 0.005
_ABORTED_WITHIN = 5.0
"""Seconds within which operations of aborted connections have failed: milliseconds, on a machine that is not overloaded."""


def abort_gloo(engine: Any) -> None:
    """Close all connections of a gloo engine; what is in flight in it fails at once. See Note [Aborting gloo]."""
    for peer in range(engine.size()):
        if peer == engine.rank():
            continue
        try:
            engine.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # the timeout that was asked for, which closes all others; or this one is closed already, and others may not be


def is_idle(natives: Sequence[Any], within: float) -> bool:
    """Whether the engine is done with all of `natives`, waiting for it at most so many seconds."""
    deadline = time.monotonic() + within
    while any(not native.is_completed() for native in natives):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def quiesce(engines: Sequence[Any], natives: Callable[[], Sequence[Any]], patience: float) -> bool:
    """Let `natives` finish, at most `patience` seconds, then abort their engines. Whether no operation is in them any more."""
    if is_idle(natives(), patience):
        return True
    abortable = [engine for engine in engines if isinstance(engine, ProcessGroupGloo)]
    for engine in abortable:
        abort_gloo(engine)
    return bool(abortable) and is_idle(natives(), _ABORTED_WITHIN)


def destroy(owned: list[Any], *, leak: Sequence[Any]) -> None:
    """Drop the references to the engines in `owned`, the last ones.

    With operations in them that cannot be stopped, `leak`, engines and operations live on forever: a destructor would wait.
    """
    if leak and owned:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object([*leak, *owned]))
        owned.clear()
    while owned:
        engine = owned.pop()
        if isinstance(engine, dist.ProcessGroup):
            engine.shutdown()
        del engine


@dataclass(frozen=True, slots=True)
class Teardown:
    """Ends what a group has in its engines, at its end or the interpreter's. Does not keep the group alive.

    See Note [The engine's threads and the interpreter's end].
    """

    ledger: Ledger
    lane: Worker
    poller: CompletionPoller
    messages: MessageThreads
    backends: dict[str, tuple[Any, Engine]]
    owned: list[Any]

    def __call__(self, abort: bool) -> None:
        """Stop the threads and drop the engines. `abort` what is in them: a process group that is not ours only at exit."""
        self.lane.stop(timeout=2.0)
        self.poller.stop(timeout=2.0)
        idle = True
        if abort:
            idle = quiesce([backend for backend, _ in self.backends.values()], self._natives, _MOMENT)
            idle &= self.messages.stop(timeout=5.0)
        self.backends.clear()
        leak = [] if idle else [native for native in self._natives() if not isinstance(native, PythonOutcome)]
        self.poller.abandoned.clear()  # a Work of ours that somebody keeps knows the poller, and must not keep the engine
        destroy(self.owned, leak=leak)

    def _natives(self) -> list[Any]:
        """The operations that the engines may be busy with."""
        pending = [work.native for work in list(self.ledger.pending.values()) if isinstance(work, C10dWork)]
        abandoned, messages = self.poller.take_abandoned(), self.messages.natives()
        return [native for native in (*pending, *abandoned, *messages) if native is not None]

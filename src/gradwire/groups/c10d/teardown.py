"""Destroys torch.distributed engines without leaving a thread inside them.

Note [The engine's threads and the interpreter's end]
A thread in C++ that waits for the interpreter lock when the interpreter shuts down is unwound by force, and the program aborts with
"terminate called without an active exception". It may be inside a call of the engine, or a thread of gloo that drops the last
reference to a tensor. So when a group ends, and at interpreter exit, operations get a moment to finish; then gloo's connections are
aborted, which fails everything in them. An engine that is still busy after that is not destroyed: a reference is leaked.

Note [Aborting gloo]
`ProcessGroupGloo.abort()` leaves operations where they are. But a receive that times out closes all connections of its engine, and
every operation fails with "Application timeout caused pair closure"; a receive with an unused tag always times out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from gradwire.groups import forked
from gradwire.groups.c10d.engine import C10dEngine
from gradwire.groups.c10d.python_work import PythonWork
from gradwire.groups.c10d.work import C10dWork, CompletionPoller, MessageThreads
from gradwire.groups.ledger import Ledger
from gradwire.runtime.threads import Worker

_UNUSED_TAG = 2**31 - 1
_MOMENT = 0.5
"""Seconds that operations in the engine get to finish when the group ends."""
_PAUSE = 0.005
_ABORTED_WITHIN = 5.0
"""Seconds within which operations on aborted connections fail; it takes milliseconds unless the machine is overloaded."""


def abort_gloo(engine: Any) -> None:
    """Close all connections of a gloo engine; what is in flight in it fails at once. See Note [Aborting gloo]."""
    for peer in range(engine.size()):
        if peer == engine.rank():
            continue
        try:
            engine.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # the intended timeout, which closes all connections; or this one is already closed, and others may not be


def is_idle(natives: Sequence[Any], within: float) -> bool:
    """Whether the engine is done with all of `natives`; waits for that at most `within` seconds."""
    deadline = time.monotonic() + within
    while any(not native.is_completed() for native in natives):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def quiesce(engines: Sequence[Any], natives: Callable[[], Sequence[Any]], patience: float) -> bool:
    """Let `natives` finish, for at most `patience` seconds, then abort their engines. Whether no operation is left in them."""
    if is_idle(natives(), patience):
        return True
    abortable = [engine for engine in engines if isinstance(engine, ProcessGroupGloo)]
    for engine in abortable:
        abort_gloo(engine)
    return bool(abortable) and is_idle(natives(), _ABORTED_WITHIN)


def destroy(owned: list[Any], *, leak: Sequence[Any]) -> None:
    """Drop the last references to the engines in `owned`. If operations in them, `leak`, cannot be stopped, engines and operations
    are leaked: a destructor would wait for them."""
    if leak and owned:
        forked.leak([*leak, *owned])
        owned.clear()
    while owned:
        engine = owned.pop()
        if isinstance(engine, dist.ProcessGroup):
            engine.shutdown()
        del engine


@dataclass(frozen=True, slots=True)
class Teardown:
    """Stops a group's operations and destroys its engines, when it is closed or at exit: see Note [The engine's threads and the
    interpreter's end]. Does not keep the group alive."""

    ledger: Ledger
    lane: Worker
    poller: CompletionPoller
    messages: MessageThreads
    backends: dict[str, tuple[Any, C10dEngine]]
    owned: list[Any]

    def __call__(self, abort: bool) -> None:
        """Stop the threads and drop the engines. `abort` their operations; in a process group that is not ours, only at exit."""
        self.lane.stop(timeout=2.0)
        self.poller.stop(timeout=2.0)
        idle = True
        if abort:
            idle = quiesce([backend for backend, _ in self.backends.values()], self._natives, _MOMENT)
            idle &= self.messages.stop(timeout=5.0)
        self.backends.clear()
        leak = [] if idle else [native for native in self._natives() if not isinstance(native, PythonWork)]
        self.poller.abandoned.clear()  # a Work that a caller keeps references the poller, and must not keep the engine alive
        destroy(self.owned, leak=leak)

    def _natives(self) -> list[Any]:
        pending = [work.native for work in list(self.ledger.pending.values()) if isinstance(work, C10dWork)]
        others = self.poller.take_abandoned() + list(self.messages.running.values())
        return [native for native in pending + others if native is not None]

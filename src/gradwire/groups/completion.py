"""Completion hooks: user callables, called for every finished operation, off the caller's thread, in completion order.

torch's PythonOnCompletionHook lets an exception escape into the engine's thread. Here one thread per group, started with
the first hook, calls them. What a hook raises is kept, and the group's next wait raises it, chained and with the hook's name.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.collectives import Signature
from gradwire.errors import HookError, UsageTypeError
from gradwire.events import Callbacks, Handle
from gradwire.runtime.threads import Worker


@dataclass(frozen=True, slots=True)
class WorkInfo:
    """A finished operation: what completion hooks receive."""

    op: Signature
    group: str
    rank: int
    seq: int
    bytes: int
    started: float
    finished: float
    error: BaseException | None

    @property
    def kind(self) -> str:
        """The operation's name, such as "all_reduce"."""
        return str(self.op.kind.value)

    @property
    def label(self) -> str:
        return self.op.label

    @property
    def duration(self) -> float:
        return self.finished - self.started


CompletionHook = Callable[[WorkInfo], None]


def name_of(fn: object) -> str:
    """A hook's name as torch gives it: its `__name__` when that is a string."""
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    return name if isinstance(name, str) else f"<{type(fn).__name__}>"


class CompletionHooks:
    """The hooks of one group and the thread that calls them. Holds no reference to the group."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._hooks: Callbacks[CompletionHook] = Callbacks()
        self._worker = Worker(f"completion-{owner}")
        self.errors: deque[HookError] = deque(maxlen=16)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, fn: CompletionHook) -> Handle:
        """Call `fn(info)` for every operation that finishes from now on."""
        if not callable(fn):
            raise UsageTypeError(
                f"on_completion of {self._owner}: {fn!r} is not callable. Pass a function of a WorkInfo."
            )
        self._worker.start()
        return self._hooks.add(fn)

    def put(self, info: WorkInfo) -> None:
        """Queue one finished operation. One that finishes after the group has ended is not reported."""
        if not self._worker.stopping.is_set():
            self._worker.put(lambda: self._call(info))

    def _call(self, info: WorkInfo) -> None:
        for fn in self._hooks:
            try:
                fn(info)
            except BaseException as error:  # a hook must not kill the thread, whatever it raises
                wrapped = HookError(
                    f"completion hook {name_of(fn)!r} of {self._owner} raised {type(error).__name__}: {error} when called for "
                    f"operation #{info.seq}, {info.op}. The operation itself is not affected; fix or remove the hook.",
                    hook=name_of(fn),
                )
                wrapped.__cause__ = error
                self.errors.append(wrapped)

    def flush(self, timeout: float) -> bool:
        """Wait until the hooks have been called for everything queued so far. False on timeout."""
        if self._worker.idle or self._worker.is_current_thread or self._worker.stopping.is_set():
            return True
        reached = threading.Event()
        self._worker.put(reached.set)
        return reached.wait(timeout)

    def stop(self, timeout: float) -> None:
        """Call the hooks for what is queued, then end the thread."""
        self._worker.stop(timeout)

"""Completion hooks: user callables told of every finished operation, off the caller's thread, in completion order.

The seed's PythonOnCompletionHook lets an exception escape into the engine's thread. Here one thread per group, started with
the first hook, calls them; what one raises is kept and comes out, named and chained, of the group's next wait.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

from gradwire.errors import HookError, UsageTypeError
from gradwire.events import Callbacks, Handle
from gradwire.groups.work import WorkInfo

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
        self._queue: queue.SimpleQueue[WorkInfo | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.errors: deque[HookError] = deque(maxlen=16)

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, fn: CompletionHook) -> Handle:
        """Call `fn(info)` for every operation that finishes from now on."""
        if not callable(fn):
            raise UsageTypeError(
                f"on_completion of {self._owner}: {fn!r} is not callable. Pass a function of one WorkInfo."
            )
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"gradwire-completion-{self._owner}", daemon=True
                )
                self._thread.start()
        return self._hooks.add(fn)

    def put(self, info: WorkInfo) -> None:
        """Queue one finished operation."""
        self._queue.put(info)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            for fn in self._hooks:
                try:
                    fn(item)
                except BaseException as error:  # a hook must not kill the thread, whatever it raises
                    self.errors.append(self._wrap(fn, item, error))

    def _wrap(self, fn: CompletionHook, info: WorkInfo, error: BaseException) -> HookError:
        wrapped = HookError(
            f"completion hook {name_of(fn)!r} of {self._owner} raised {type(error).__name__}: {error} "
            f"when told of operation #{info.seq}, {info.op}. The operation itself is not affected; mend or remove the hook.",
            hook=name_of(fn),
        )
        wrapped.__cause__ = error
        return wrapped

    def flush(self, timeout: float) -> bool:
        """Wait until the hooks have been told of everything queued so far. True if they have."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout)

    def stop(self, timeout: float) -> None:
        """Tell the hooks what is queued, then end the thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout)

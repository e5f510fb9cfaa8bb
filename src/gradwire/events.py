"""Typed events, and the emitter that delivers them to listeners.

Nothing is built, formatted or timed if there is no listener: `if events: events.emit(...)`. Listeners run in the thread that emits
and must be quick. What a listener raises is warned about once, kept in `Emitter.errors` and never raised in the emitting layer.

Note [SystemExit in callbacks]
A user's callback may raise SystemExit or KeyboardInterrupt. In the main thread they are raised, to end the program. In any other
thread they would silently end only that thread, which later operations may need: there they are kept like any other exception.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened at `time` (seconds on `time.perf_counter`'s clock)."""

    time: float


@dataclass(frozen=True, slots=True)
class CollectiveEvent(Event):
    """Something happened to operation number `seq` of the group called `group`, on `rank`."""

    group: str
    rank: int
    seq: int
    kind: str
    label: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class CollectiveSubmitted(CollectiveEvent):
    """The caller handed the operation to the group."""


@dataclass(frozen=True, slots=True)
class CollectiveStarted(CollectiveEvent):
    """The engine has started it: its call was made, or every peer has joined."""


@dataclass(frozen=True, slots=True)
class CollectiveFinished(CollectiveEvent):
    """The result is in the outputs, `duration` seconds after submission."""

    duration: float


@dataclass(frozen=True, slots=True)
class CollectiveFailed(CollectiveEvent):
    """It will never finish; `error` is the cause."""

    duration: float
    error: BaseException


@dataclass(frozen=True, slots=True)
class RankEvent(Event):
    """Something happened in the model on `rank`."""

    rank: int


@dataclass(frozen=True, slots=True)
class GradientReady(RankEvent):
    """A parameter's gradient has been accumulated: the only event whose time distinguishes a slow rank from one that waits."""

    parameter: str
    index: int


@dataclass(frozen=True, slots=True)
class BucketFull(RankEvent):
    """All gradients of a bucket are in its buffer."""

    bucket: int
    parameters: tuple[str, ...]
    numel: int


@dataclass(frozen=True, slots=True)
class BucketLaunched(RankEvent):
    """The bucket's reduction has begun."""

    bucket: int


@dataclass(frozen=True, slots=True)
class BucketReduced(RankEvent):
    """The averages of a bucket are back in `.grad`; on CUDA, once the stream has reached this point."""

    bucket: int


@dataclass(frozen=True, slots=True)
class ForwardBegan(RankEvent):
    """The module's forward begins: what ranks exchange before it, such as buffers, is done."""


@dataclass(frozen=True, slots=True)
class ForwardEnded(RankEvent):
    """The module's forward has ended."""


@dataclass(frozen=True, slots=True)
class BackwardBegan(RankEvent):
    """A backward, averaged or not, has reached the model's outputs."""


@dataclass(frozen=True, slots=True)
class BackwardEnded(RankEvent):
    """Autograd has computed every gradient; the rest of the step, if this backward is averaged, waits for reductions."""


@dataclass(frozen=True, slots=True)
class StepEnded(RankEvent):
    """Every gradient of step number `step` is averaged."""

    step: int


class Handle:
    """Removes one registration. Removing twice is a no-op; as a context manager it removes on exit."""

    __slots__ = ("_remove",)

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove: Callable[[], object] | None = remove

    def remove(self) -> None:
        """Remove the registration."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()


F = TypeVar("F")


class Callbacks(Generic[F]):
    """Callables in registration order. Iteration is over a snapshot, so callables may be added or removed during it."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[object, F] = {}

    def add(self, fn: F) -> Handle:
        """Register `fn`; the same function may be registered more than once."""
        key = object()
        self._entries[key] = fn
        return Handle(lambda: self._entries.pop(key, None))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._entries.values()))


def is_kept(error: BaseException) -> bool:
    """Whether an error that a callback raised in this thread is kept instead of raised: see Note [SystemExit in callbacks]."""
    return isinstance(error, Exception) or threading.current_thread() is not threading.main_thread()


Listener = Callable[[Any], None]
Kinds = type["Event"] | tuple[type["Event"], ...]


class Emitter:
    """Delivers events to listeners.

    >>> events, seen = Emitter(), []
    >>> with events.listen(seen.append):
    ...     events.emit(Event(time=1.0))
    >>> seen, bool(events)
    ([Event(time=1.0)], False)
    """

    __slots__ = ("_listeners", "_warned", "errors")

    def __init__(self) -> None:
        self._listeners: Callbacks[tuple[Listener, Kinds]] = Callbacks()
        self._warned = False
        self.errors: deque[BaseException] = deque(maxlen=16)
        """The last exceptions that listeners have raised."""

    def __bool__(self) -> bool:
        return bool(self._listeners._entries)

    def listen(self, fn: Listener, *, only: Kinds = Event) -> Handle:
        """Call `fn(event)` for every event from now on, or for those of the classes in `only`."""
        return self._listeners.add((fn, only))

    def wants(self, kind: type[Event]) -> bool:
        """Whether there is a listener for events of this class."""
        return any(issubclass(kind, only) for _, only in self._listeners)

    def emit(self, event: Event) -> None:
        """Call every listener; one that raises does not affect the others or the caller."""
        for listener, only in self._listeners:
            if not isinstance(event, only):
                continue
            try:
                listener(event)
            except BaseException as error:
                if not is_kept(error):
                    raise
                self.errors.append(error)
                if not self._warned:
                    self._warned = True
                    warnings.warn(
                        f"the listener {listener!r} raised {type(error).__name__}: {error}, on {event}. Such errors are kept in "
                        "the emitter's `errors`; there will be no further warning.",
                        stacklevel=2,
                    )

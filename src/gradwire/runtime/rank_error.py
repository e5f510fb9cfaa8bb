"""`RankError`: an uncaught exception of a rank, as data in the run directory. The rank writes it; the launcher and reports read it.

No code parses a traceback or a message: what an error is about is in its attributes. Without torch.

Note [Which failure is shown]
When a rank fails the others usually fail after it. So the earliest failure is shown; but a rank aborts its group before it exits,
and times are inexact. So among failures within `NEAR` seconds of the earliest, one that looks like no consequence goes first.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from gradwire import errors
from gradwire.runtime.private_file import read_private, write_private

NEAR = 1.0
"""Seconds within which failures count as simultaneous."""
T = TypeVar("T")
MAIN, THREAD = ".error", ".thread-error"
"""Of the files for the exception that ended a rank, and for the first one that ended another of its threads."""
_LONGEST = 1 << 18
_TORCHS = frozenset({"DistBackendError", "DistNetworkError"})
"""What torch's groups raise, usually because another rank has failed."""


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception that nothing in the script has caught."""

    rank: int
    name: str
    module: str
    text: str
    traceback: str
    """As Python prints it, with causes and notes; the script's frames only."""
    time: float
    """When it was raised, in seconds on the monotonic clock."""
    step: int | None = None
    culprits: tuple[int, ...] = ()
    """The ranks that the error is about, which need not include the rank that raised it."""
    summary: str = ""
    """What the error states about `culprits`, e.g. "rank 1 was lost"."""
    consequence: int = 0
    """0 for a failure of the rank itself, 1 for a timeout, 2 for an error that another rank's failure usually causes."""
    starting: bool = False
    """Whether the rank was importing modules or joining its world."""
    thread: str = ""
    """The thread that it ended, if that was not the main thread."""

    @classmethod
    def of(cls, error: BaseException, rank: int, *, thread: str = "") -> RankError:
        """Describe `error`, of which nothing is kept."""
        ours = next((cause for cause in _causes(error) if isinstance(cause, errors.GradwireError)), None)
        step = getattr(ours, "step", None)
        culprits, summary = _subject(ours)
        return cls(
            rank,
            type(error).__qualname__,
            type(error).__module__,
            _message(error)[:_LONGEST],
            "".join(traceback.format_exception(error))[-_LONGEST:],
            time.monotonic(),
            step if isinstance(step, int) else None,
            culprits,
            summary,
            max(map(_consequence, _causes(error))),
            _is_starting(error.__traceback__),
            thread,
        )

    def save(self, directory: str | Path, name: str = "") -> None:
        """Write it to `directory`, for `name` or else the rank. Of the exceptions that end threads, the first is kept."""
        path = Path(directory, f"rank-{name or self.rank}{THREAD if self.thread else MAIN}")
        if not (self.thread and os.path.lexists(path)):
            write_private(path, json.dumps(dataclasses.asdict(self)).encode())

    @classmethod
    def load(cls, directory: str | Path, rank: int, suffix: str = MAIN, name: str = "") -> RankError | None:
        """What `rank` has written, if it has, and if it can be read."""
        try:
            saved = json.loads(read_private(Path(directory, f"rank-{name or rank}{suffix}")))
            error = cls(**{**saved, "culprits": tuple(map(int, saved["culprits"]))})
            strings = (error.name, error.module, error.text, error.traceback, error.summary, error.thread)
            valid = error.rank == rank and all(isinstance(text, str) for text in strings)
            return error if valid and isinstance(error.time, float) and error.consequence in (0, 1, 2) else None
        except (OSError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those it was explicitly raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def name_ranks(ranks: Sequence[int], one: str = "", several: str = "") -> str:
    """Ranks as people write them, with the verb that fits.

    >>> name_ranks([2], "was lost", "were lost"), name_ranks([3, 1])
    ('rank 2 was lost', 'ranks 1, 3')
    """
    text = ", ".join(map(str, sorted(ranks)))
    return (f"ranks {text} {several or one}" if len(ranks) > 1 else f"rank {text} {one}").rstrip()


def _subject(error: errors.GradwireError | None) -> tuple[tuple[int, ...], str]:
    """The ranks that an error is about, and what it states about them."""
    match error:
        case errors.PeerLost(rank=int(rank)):
            return (rank,), f"rank {rank} was lost"
        case errors.CollectiveTimeout(missing=(_, *_) as ranks):
            return tuple(ranks), name_ranks(ranks, "was missing", "were missing")
        case errors.LayoutError(ranks=(_, *_) as ranks):
            return tuple(ranks), name_ranks(ranks, "has other parameters", "have other parameters")
        case errors.NonFiniteGradient(rank=int(rank)):
            return (rank,), f"on rank {rank} the gradient of {error.parameter or 'a parameter'} is not finite"
        case errors.ReplicasDiverged(ranks=(_, *_) as ranks):
            where = f"in {error.parameters[0]}" if error.parameters else "in its parameters"
            return tuple(ranks), name_ranks(ranks, f"differs {where}", f"differ {where}")
        case errors.CollectiveMismatch():
            ops = list(error.ops.values())
            odd = tuple(rank for rank, op in error.ops.items() if op != max(ops, key=ops.count))
            return odd, name_ranks(odd, "submitted another operation than the others") if odd else ""
    return (), ""


def _consequence(error: BaseException) -> int:
    if isinstance(error, (errors.PeerLost, errors.GroupAborted)) or type(error).__name__ in _TORCHS:
        return 2
    return int(isinstance(error, errors.CollectiveTimeout))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:
        return f"<no message: str() raised {type(failure).__name__}>"


def is_importing(frames: TracebackType | None) -> bool:
    """Whether a module other than the script was being imported."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(frames)]
    modules = sum(code.co_name == "<module>" for code in codes)
    return modules > 1 or any(code.co_filename.startswith("<frozen importlib") for code in codes)


def _is_starting(frames: TracebackType | None) -> bool:
    """Whether a module other than the script was being imported, or gw.init() called."""
    launching = any("/gradwire/launch/" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(frames))
    return launching or is_importing(frames)


def root_cause(failures: Iterable[T], *, when: Callable[[T], float], consequence: Callable[[T], int]) -> T | None:
    """The failure to show: of those near the earliest, the one with the lowest `consequence` (see RankError), then the earliest.

    >>> failures = [(3.0, "PeerLost"), (3.2, "ValueError"), (9.0, "ValueError")]
    >>> root_cause(failures, when=lambda f: f[0], consequence=lambda f: int(f[1] == "PeerLost"))
    (3.2, 'ValueError')
    """
    known = list(failures)
    limit = min(map(when, known), default=0.0) + NEAR
    near = [failure for failure in known if when(failure) <= limit]
    return min(near, key=lambda failure: (consequence(failure), when(failure)), default=None)

"""What came of a run: which rank failed first, what its last words were, and the launcher's exit code. Pure.

Note [Which failure is shown]
When a rank fails the others usually fail after it, because their peer is lost or the group was aborted under them. So the
earliest failure is the one to show. But a rank that raises aborts its group before it has printed its traceback and ended, and
a peer may come to its own end before it. So among failures within `NEAR` seconds of the earliest, one that does not look like
a consequence goes first. What looks like one is told by the exception's name at the end of the rank's last traceback.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NEAR = 1.0
"""Seconds within which failures count as simultaneous."""

_CONSEQUENCES = frozenset({"PeerLost", "GroupAborted", "DistBackendError", "DistNetworkError"})
_HEAD = b"Traceback (most recent call last):"
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_RAISED = re.compile(rb"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::|$)")
_WITHOUT_TRACEBACK = 20
"""Lines that are shown of a rank which left no traceback."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank came to its end."""

    rank: int
    status: int
    """Its exit code, or the negative number of the signal that killed it."""
    after: float
    """Seconds since the start."""
    stopped: bool = False
    """Whether the launcher had told it to end by then."""
    words: tuple[bytes, ...] = ()
    """The last lines of its standard error."""

    @property
    def failed(self) -> bool:
        """Whether it ended badly and by itself."""
        return self.status != 0 and not self.stopped

    @property
    def is_consequence(self) -> bool:
        """Whether it looks like the consequence of another rank's failure."""
        return self.status > 0 and raised(self.words) in _CONSEQUENCES

    @property
    def exit_code(self) -> int:
        """As shells count."""
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        how = f"exit code {self.status}" if self.status >= 0 else f"killed by {_name(-self.status)}"
        return f"{how}, after {self.after:.1f} s"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The failure that the others follow from. See Note [Which failure is shown]."""
    failures = [ending for ending in endings if ending.failed]
    limit = min((ending.after for ending in failures), default=0.0) + NEAR
    return min(
        (ending for ending in failures if ending.after <= limit),
        key=lambda ending: (ending.is_consequence, ending.after, ending.rank),
        default=None,
    )


def summary(first: Ending, endings: Iterable[Ending]) -> str:
    """One line on the failure and on what became of the others.

    >>> summary(Ending(2, 1, 3.21), [Ending(r, -15, 3.3, stopped=True) for r in (0, 1, 3)])
    'rank 2 failed first (exit code 1, after 3.2 s); ranks 0, 1, 3 were stopped'
    """
    others = [ending for ending in endings if ending.rank != first.rank]
    parts = [f"rank {first.rank} failed {'first ' if others else ''}({first})"]
    for words, ranks in (
        (("was stopped", "were stopped"), [e.rank for e in others if e.stopped]),
        (("failed too", "failed too"), [e.rank for e in others if e.failed]),
        (("had finished", "had finished"), [e.rank for e in others if not e.stopped and not e.failed]),
    ):
        if ranks:
            parts.append(f"{_ranks(ranks)} {words[len(ranks) > 1]}")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def last_words(lines: Sequence[bytes]) -> Sequence[bytes]:
    """The last traceback, with those it was chained to and what was written after it; without one, the last few lines."""
    heads = [i for i, line in enumerate(lines) if _HEAD in line]
    if not heads:
        return lines[-_WITHOUT_TRACEBACK:]
    start = heads.pop()
    while heads and any(link in lines[start - 2 : start] for link in _LINKS):
        start = heads.pop()
    return lines[start:]


def raised(lines: Sequence[bytes]) -> str | None:
    """The name, without its module, of the exception at the end of the last traceback.

    >>> raised(
    ...     [
    ...         b"Traceback (most recent call last):",
    ...         b'  File "x.py", line 1',
    ...         b"gradwire.errors.PeerLost: rank 1 is lost",
    ...     ]
    ... )
    'PeerLost'
    """
    heads = [
        i for i, line in enumerate(lines) if line.endswith(_HEAD)
    ]  # something without a line feed may stand before it
    for line in lines[heads[-1] + 1 :] if heads else ():
        if line and not line.startswith(b" "):
            match = _RAISED.match(line)
            return None if match is None else match[1].decode()
    return None

"""The outcome of a run: which rank failed first, its final output, and the launcher's exit code. Pure.

Note [What looks like a consequence]
`root_cause.py` picks the failure that is shown. Whether a failure looks like a consequence is decided by the exception's name at
the end of the rank's last traceback. A timeout may be either: it is raised by the ranks that waited, so any other error that is not
a consequence takes precedence.

Note [Who is named]
Some errors are raised by ranks that did nothing wrong: a timeout by all but the missing rank, a PeerLost by those that wait for
a rank that has exited, a disagreement or a NaN of one rank by all. Their text names the ranks concerned; the last line of a run
repeats it, and does not blame the rank that raised it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradwire.launch.tracebacks import HEAD
from gradwire.runtime.root_cause import root_cause

_CONSEQUENCES = frozenset({"PeerLost", "GroupAborted", "DistBackendError", "DistNetworkError"})
_TIMEOUT, _LOST, _INTERRUPT = "CollectiveTimeout", "PeerLost", "KeyboardInterrupt"
_STARTING = (b"<frozen importlib._bootstrap", b"gradwire/launch/")
_MODULE = b", in <module>"
_MISSING = (
    re.compile(rb"missing: ranks \[([\d, ]+)\]"),
    re.compile(rb"ranks \[([\d, ]+)\] (?:have|had|did) not"),
)
_LOST_RANK = re.compile(rb"rank \d+(?= is lost)")
_DIFFERENT = {
    "LayoutError": re.compile(rb"rank \d+ and rank \d+ disagree"),
    "CollectiveMismatch": re.compile(
        rb"ranks differ in \w+: (?:rank \d+ has|ranks \[[\d, ]+\] have) .*?, the others have [^.]*"
    ),
    "NonFiniteGradient": re.compile(rb"on rank \d+ the gradient of \S+ is (?:NaN|infinite|too large)"),
    "ReplicasDiverged": re.compile(rb"ranks? \d+[^.:]*? differs? (?:from the majority )?in [^ ,]*[^ ,.]"),
}
"""How errors name the ranks they concern. See Note [Who is named]."""
_LINKS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
_RANK = re.compile(rb"\[rank\d+\]: ?")
"""torch's prefix of each line of an uncaught exception, once a script has called init_process_group."""
_RAISED = re.compile(rb"(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?::|$)")
_WITHOUT_TRACEBACK = 20
"""Number of lines shown of a rank without a traceback."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank ended."""

    rank: int
    status: int
    """Its exit code, or the negative number of the signal that killed it."""
    after: float
    """Seconds since the start."""
    stopped: bool = False
    """Whether the launcher had sent it a signal to end by then."""
    words: tuple[bytes, ...] = ()
    """The last lines of its standard error."""

    @property
    def failed(self) -> bool:
        """Whether it failed, without having been stopped."""
        return self.status != 0 and not self.stopped

    def has_failed_with(self, first: Ending) -> bool:
        """Whether it ended by the same exception as `first`, even if it was told to end meanwhile: ranks agree on many errors.

        If a signal has ended it, it may have caught the exception long before, so the message must be the same too.
        """
        if self.status == 0 or raised(self.words) is None or raised(self.words) != raised(first.words):
            return False
        return self.status > 0 or _final(self.words) == _final(first.words)

    @property
    def is_consequence(self) -> bool:
        """Whether it looks like the consequence of another rank's failure."""
        return self.status > 0 and raised(self.words) in _CONSEQUENCES

    @property
    def consequence(self) -> int:
        """0 for a failure of the rank itself, 1 for a timeout, 2 for a consequence."""
        if self.is_consequence:
            return 2
        return int(self.status > 0 and raised(self.words) == _TIMEOUT)

    @property
    def while_starting(self) -> bool:
        """Whether the rank was interrupted while it imported modules or met the others."""
        if raised(self.words) != _INTERRUPT:
            return False
        frames = final_output(self.words)
        # The script is the first module; Python omits the import system's own frames if there are others.
        return sum(line.endswith(_MODULE) for line in frames) > 1 or any(
            m in line for line in frames for m in _STARTING
        )

    @property
    def exit_code(self) -> int:
        """The exit code as shells report it."""
        return self.status if self.status >= 0 else 128 - self.status

    def __str__(self) -> str:
        return described(self.status, self.after)


def described(status: int, after: float) -> str:
    """A description of how a process ended: `status` is its exit code, or the negative number of a signal.

    >>> described(-9, 3.21)
    'killed by SIGKILL, after 3.2 s'
    """
    how = f"exit code {status}" if status >= 0 else f"killed by {_name(-status)}"
    return f"{how}, after {after:.1f} s"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def first_failure(endings: Iterable[Ending]) -> Ending | None:
    """The failure that caused the others."""
    failures = sorted((ending for ending in endings if ending.failed), key=lambda ending: ending.rank)
    return root_cause(failures, when=lambda ending: ending.after, consequence=lambda ending: ending.consequence)


def summary(first: Ending, endings: Iterable[Ending]) -> str:
    """One line about the failure and about what happened to the other ranks.

    >>> summary(Ending(2, 1, 3.21), [Ending(r, -15, 3.3, stopped=True) for r in (0, 1, 3)])
    'rank 2 failed first (exit code 1, after 3.2 s); ranks 0, 1, 3 were stopped'
    """
    others = [ending for ending in endings if ending.rank != first.rank]
    too = [e.rank for e in others if e.failed or e.has_failed_with(first)]
    about = subject(first.words)
    if about is None:
        parts = [f"rank {first.rank} failed {'first ' if others else ''}({first})"]
    else:
        parts = [f"{about} ({raised(first.words)} on rank {first.rank}, {first})"]
    for words, ranks in (
        (("was stopped", "were stopped"), [e.rank for e in others if e.stopped and e.rank not in too]),
        (("failed too", "failed too"), too),
        (("had finished", "had finished"), [e.rank for e in others if not e.stopped and not e.failed]),
    ):
        if ranks:
            parts.append(f"{_ranks(ranks)} {words[len(ranks) > 1]}")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def subject(lines: Sequence[bytes]) -> str | None:
    """The ranks that the last exception concerns, if they are not the rank that raised it. See Note [Who is named].

    >>> head = [b"Traceback (most recent call last):"]
    >>> subject(
    ...     [*head, b"gradwire.errors.CollectiveTimeout: all_reduce. Joined: ranks [0]; missing: ranks [1, 2]. Look"]
    ... )
    'ranks 1, 2 were missing'
    """
    name, line = raised(lines), _final(lines) or b""
    if name == _TIMEOUT:
        for pattern in _MISSING:
            if match := pattern.search(line):
                ranks = [int(rank) for rank in match[1].split(b",")]
                return f"{_ranks(ranks)} {'were' if len(ranks) > 1 else 'was'} missing"
    elif name == _LOST and (match := _LOST_RANK.search(line)):
        return f"{match[0].decode()} was lost"
    elif name in _DIFFERENT and (match := _DIFFERENT[name].search(line)):
        return match[0].decode()
    return None


def shortened(lines: Sequence[bytes]) -> list[bytes]:
    """The short form of a traceback that is not shown: the exception and the first line of its message.

    For a KeyboardInterrupt, which has no message, what was written after it.
    """
    line = _final(lines)
    if line is None:
        return list(lines)
    lines = _plain(lines)
    if raised(lines) == _INTERRUPT:
        return list(lines[max(i for i, other in enumerate(lines) if other == line) + 1 :])
    return [line]


def final_output(lines: Sequence[bytes]) -> Sequence[bytes]:
    """The last traceback, with those it was chained to and what was written after it; without one, the last few lines."""
    heads = [i for i, line in enumerate(lines) if HEAD in line]
    if not heads:
        return lines[-_WITHOUT_TRACEBACK:]
    start = heads.pop()
    plain = _plain(lines)
    while heads and any(link in plain[start - 2 : start] for link in _LINKS):
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
    line = _final(lines)
    match = None if line is None else _RAISED.match(line)
    return None if match is None else match[1].decode()


def _final(lines: Sequence[bytes]) -> bytes | None:
    """The line of the last traceback that names the exception."""
    lines = _plain(lines)
    # Text without a line feed may precede the head.
    heads = [i for i, line in enumerate(lines) if line.endswith(HEAD)]
    return (
        next((line for line in lines[heads[-1] + 1 :] if line and not line.startswith(b" ")), None) if heads else None
    )


def _plain(lines: Sequence[bytes]) -> list[bytes]:
    """Lines without torch's `[rank0]: `."""
    return [line[match.end() :] if (match := _RANK.match(line)) else line for line in lines]

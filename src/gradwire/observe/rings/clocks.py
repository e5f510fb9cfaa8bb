"""Puts the records of several hosts on one clock. Pure.

Note [Clocks from causes]
Ranks of one host share the monotonic clock. Those of different hosts are aligned by what they did together: an all-reduce cannot
end on one rank before it was submitted on another. Each such pair bounds the difference of the two clocks from one side, and the
pairs in the other direction from the other. The line in the middle of what is left is the estimate (`clock_line.py`), and how far
it may be off is about the time that the fastest collectives take. So nothing has to be measured while the job runs, the wall clocks
of the hosts need not agree, they may drift, and in the merged trace no effect comes before its cause. A message bounds the
difference from one side: it is not received before it was sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from gradwire.observe.rings.clock_line import ClockLine, fit_line
from gradwire.observe.rings.ring import Record, Ring, message_key
from gradwire.recorder.flight_recorder import RecordKind

_MEETING = frozenset(
    {
        "all_reduce",
        "all_gather",
        "all_gather_into_tensor",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "all_to_all",
        "all_to_all_single",
        "barrier",
    }
)
"""Operations that end on no rank before they were submitted on all."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How the clock of a host becomes that of the first one: see `apply`."""

    offset: int
    """Nanoseconds to add at the time `at`."""
    error: int
    """At most this wrong, if the clocks run at constant speeds. -1: the hosts have nothing in common that would tell."""
    drift: float = 0.0
    """How much more to add for each nanosecond after `at`."""
    at: int = 0

    def apply(self, time: int) -> int:
        """A time on the first host's clock."""
        return time + self.offset + round(self.drift * (time - self.at))


_SAME = Alignment(0, 0)


def align(rings: Sequence[Ring]) -> dict[str, Alignment]:
    """The alignment of every host to that of the first ring."""
    hosts = list(dict.fromkeys(ring.clock for ring in rings))
    found = dict.fromkeys(hosts[:1], _SAME)
    if len(hosts) < 2:
        return found
    meetings = _Meetings(rings)
    bounds = meetings.bounds()
    while True:
        # A host that shares a group with an aligned one, the best known first.
        candidates = [
            (max(0.0, _width(bounds, known, host)), hosts.index(known), hosts.index(host))
            for known in found
            for host in hosts
            if host not in found and _width(bounds, known, host) < math.inf
        ]
        if not candidates:
            break
        _, i, j = min(candidates)
        known, host = hosts[i], hosts[j]
        found[host] = _joined(meetings.line(known, host), found[known])
    for ring in rings:  # by the wall clock, for want of anything better
        host = ring.clock
        if host not in found:
            first, here = rings[0].header, ring.header
            offset = (here["started_wall"] - here["started"]) - (first["started_wall"] - first["started"])
            for known, alignment in found.items():  # but not so that a message is received before it was sent
                low = alignment.offset - bounds.get((known, host), math.inf)
                high = alignment.offset + bounds.get((host, known), math.inf)
                offset = round(max(low, min(offset, high)))
            found[host] = Alignment(offset, -1)
    return found


def _joined(line: ClockLine, known: Alignment) -> Alignment:
    """The alignment of a host whose clock differs by `line` from one that is aligned already."""
    on_known = line.at + line.offset
    return Alignment(
        line.offset + known.apply(on_known) - on_known,
        line.error + known.error,
        line.drift + known.drift * (1 + line.drift),
        line.at,
    )


def aligned(rings: Sequence[Ring]) -> list[Ring]:
    """The rings with all times on the clock of the first ring's host."""
    alignments = align(rings)
    return [on_one_clock(ring, alignments[ring.clock]) for ring in rings]


class AlignedRings(Sequence[Ring]):
    """Rings on one clock, each made when it is asked for: all of them may not fit into memory."""

    def __init__(self, rings: Sequence[Ring], alignments: Mapping[str, Alignment]) -> None:
        self._rings, self._alignments = rings, alignments

    @overload
    def __getitem__(self, index: int) -> Ring: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Ring]: ...

    def __getitem__(self, index: int | slice) -> Ring | Sequence[Ring]:
        if isinstance(index, slice):
            return AlignedRings(self._rings[index], self._alignments)
        ring = self._rings[index]
        return on_one_clock(ring, self._alignments[ring.clock])

    def __len__(self) -> int:
        return len(self._rings)


def on_one_clock(ring: Ring, alignment: Alignment) -> Ring:
    """A ring with all its times on the first host's clock."""
    if alignment.offset == 0 and alignment.drift == 0:
        return ring
    apply = alignment.apply

    def moved(record: Record) -> Record:
        time = apply(record.time)
        return record._replace(time=time, duration=time - apply(record.time - record.duration))

    warnings = [{**one, "time": apply(int(one["time"]))} for one in ring.descriptions.get("warning", [])]
    return replace(
        ring,
        header={**ring.header, "started": apply(int(ring.header["started"]))},
        records=[moved(record) for record in ring.records],
        descriptions={**ring.descriptions, **({"warning": warnings} if warnings else {})},
    )


def ambiguous_groups(rings: Sequence[Ring]) -> set[str]:
    """Names that several groups share, whose operations cannot be matched by name: two ranks of the world are one rank there."""
    holders: dict[tuple[str, int], set[int]] = defaultdict(set)
    for ring in rings:
        for record in ring.records:
            if record.group:
                holders[record.group, record.rank].add(ring.rank)
    return {group for (group, _), ranks in holders.items() if len(ranks) > 1}


def _width(bounds: dict[tuple[str, str], float], known: str, host: str) -> float:
    return bounds.get((known, host), math.inf) + bounds.get((host, known), math.inf)


class _Meetings:
    """What ranks of different hosts did together: when it was submitted on each host, and when it had ended there."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._begun: dict[_Key, dict[str, int]] = defaultdict(dict)
        """By operation and host: the last submission."""
        self._ended: dict[_Key, dict[str, int]] = defaultdict(dict)
        """And the first end."""
        self._twice: set[_Key] = set()
        """A group was closed, and another of its name counts from 1 again."""
        doubtful = ambiguous_groups(rings)
        for ring in rings:
            self._add(ring, doubtful)
        for key in self._twice:
            self._begun.pop(key, None)

    def _add(self, ring: Ring, doubtful: set[str]) -> None:
        host = ring.clock
        seen: set[_Key] = set()
        for record in ring.of_kind(RecordKind.COLLECTIVE_FINISHED):
            if record.op in _MEETING:
                key: _Key = (record.group, record.ordinal)
            elif record.peer >= 0:
                key = ("message", *message_key(record))
            else:
                continue
            if record.group in doubtful:
                continue
            if (record.op, *key) in seen:
                self._twice.add(key)
            seen.add((record.op, *key))
            if record.op != "recv":
                begun, submitted = self._begun[key], record.time - record.duration
                begun[host] = max(begun.get(host, submitted), submitted)
            if record.op != "send":
                ended = self._ended[key]
                ended[host] = min(ended.get(host, record.time), record.time)

    def _pairs(self, a: str | None = None, b: str | None = None) -> Iterator[tuple[str, str, int, int]]:
        """Of operations, a host that has submitted it, another on which it has ended, and the times of that there."""
        for key, submissions in self._begun.items():
            for one, submitted in submissions.items() if a is None else _only(submissions, a):
                ends = self._ended.get(key, {})
                for other, end in ends.items() if b is None else _only(ends, b):
                    if one != other:
                        yield one, other, submitted, end

    def bounds(self) -> dict[tuple[str, str], float]:
        """By pair of hosts (a, b): the least seen of "ended on b" - "submitted on a", which is at least clock(b) - clock(a)."""
        bounds: dict[tuple[str, str], float] = {}
        for a, b, submitted, end in self._pairs():
            bounds[a, b] = min(bounds.get((a, b), math.inf), end - submitted)
        return bounds

    def line(self, known: str, host: str) -> ClockLine:
        """What to add to times of `host` to get those of `known`: no end may come before a submission."""
        lower = [(end, submitted - end) for _, _, submitted, end in self._pairs(known, host)]
        upper = [(submitted, end - submitted) for _, _, submitted, end in self._pairs(host, known)]
        return fit_line(lower, upper)


_Key = tuple[object, ...]


def _only(times: dict[str, int], host: str) -> list[tuple[str, int]]:
    return [(host, times[host])] if host in times else []

"""Puts the records of several hosts on one clock. Pure.

Note [Clocks from causes]
Ranks of one host share the monotonic clock. Those of different hosts are aligned by what they did together: an all-reduce cannot
end on one rank before it was submitted on another. Each such pair bounds the difference of the two clocks from one side, and the
pairs in the other direction from the other; a message, which is not received before it was sent, bounds it from one side. Clocks
drift, by up to 50 millionths or 180 ms in an hour, so the difference is a line: the one that stays furthest from all bounds, and
in a short time a constant. So nothing has to be measured while the job runs, the wall clocks of the hosts need not agree, and in
the merged trace no effect comes before its cause.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, overload

from gradwire.observe.rings.ring import Record, Ring, message_key
from gradwire.recorder.format import RecordKind

if TYPE_CHECKING:
    import numpy as np

_STEEPEST = 1e-3
"""Clocks do not differ by more than that in speed."""
_SHORT = 60 * 10**9
_SLOPES, _ZOOMS = 33, 9
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


def _joined(line: Alignment, known: Alignment) -> Alignment:
    """The alignment of a host whose clock differs by `line` from one that is aligned already."""
    on_known = line.at + line.offset
    return Alignment(
        line.offset + known.apply(on_known) - on_known,
        line.error + known.error,
        line.drift + known.drift * (1 + line.drift),
        line.at,
    )


_Bounds = Sequence[tuple[int, int]]
"""Times, and bounds of the difference of two clocks at these times, in nanoseconds."""


def fit_line(lower: _Bounds, upper: _Bounds) -> Alignment:
    """The line above all of `lower` and below all of `upper`, neither of which is empty, that is furthest from them.

    For a slope, the room between the highest line below and the lowest line above is a concave function: its maximum is found by
    zooming in. If no line keeps all bounds, e.g. because a clock was set, `error` is by how much this one fails.
    """
    import numpy as np

    times = [time for time, _ in (*lower, *upper)]
    first, last = min(times), max(times)
    at, base = (first + last) // 2, lower[0][1]
    below, above = (np.array([(time - at, y - base) for time, y in bounds], float).T for bounds in (lower, upper))

    def limits(slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """By slope: the least and the greatest difference at the time `at` that keep the bounds."""
        floors = [(below[1] - slope * below[0]).max() for slope in slopes]
        return np.array(floors), np.array([(above[1] - slope * above[0]).min() for slope in slopes])

    floor, ceiling = limits(np.zeros(1))
    slope, slopes = 0.0, np.zeros(1)
    if last - first >= _SHORT or ceiling[0] < floor[0]:
        low, high = -_STEEPEST, _STEEPEST
        for _ in range(_ZOOMS):
            slopes = np.linspace(low, high, _SLOPES)
            floor, ceiling = limits(slopes)
            best = np.flatnonzero(ceiling - floor >= (ceiling - floor).max())
            low, high = slopes[max(0, best[0] - 1)], slopes[min(len(slopes) - 1, best[-1] + 1)]
        slope = float((slopes[best[0]] + slopes[best[-1]]) / 2)
        floor, ceiling = limits(np.array([slope]))
    middle, room = float(floor[0] + ceiling[0]) / 2, float(ceiling[0] - floor[0])
    error = abs(room) / 2
    if slope and room > 0:  # every other line that keeps the bounds might be the true one
        width = room / min(at - first, last - at)
        slopes = np.linspace(slope - width, slope + width, 4 * _SLOPES)
        floor, ceiling = limits(slopes)
        kept = ceiling >= floor
        for x in (first - at, last - at):
            here = middle + slope * x
            most, least = (ceiling + slopes * x)[kept], (floor + slopes * x)[kept]
            error = max(error, most.max(initial=here) - here, here - least.min(initial=here))
    return Alignment(base + round(middle), math.ceil(error), slope, at)


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


def _width(bounds: dict[tuple[str, str], float], known: str, host: str) -> float:
    return bounds.get((known, host), math.inf) + bounds.get((host, known), math.inf)


class _Meetings:
    """What ranks of different hosts did together: when it was submitted on each host, and when it had ended there."""

    def __init__(self, rings: Sequence[Ring]) -> None:
        self._begun: dict[_Key, dict[str, int]] = defaultdict(dict)
        """By operation and host: the last submission."""
        self._ended: dict[_Key, dict[str, int]] = defaultdict(dict)
        """And the first end."""
        for ring in rings:
            self._add(ring)

    def _add(self, ring: Ring) -> None:
        host = ring.clock
        for record in ring.of_kind(RecordKind.COLLECTIVE_FINISHED):
            if record.op in _MEETING:
                key: _Key = (record.group_id, record.ordinal)
            elif record.peer >= 0:
                key = ("message", *message_key(record))
            else:
                continue
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

    def line(self, known: str, host: str) -> Alignment:
        """What to add to times of `host` to get those of `known`: no end may come before a submission."""
        lower = [(end, submitted - end) for _, _, submitted, end in self._pairs(known, host)]
        upper = [(submitted, end - submitted) for _, _, submitted, end in self._pairs(host, known)]
        return fit_line(lower, upper)


_Key = tuple[object, ...]


def _only(times: dict[str, int], host: str) -> list[tuple[str, int]]:
    return [(host, times[host])] if host in times else []

"""Puts the records of several hosts on one clock. Pure.

Note [Clocks from causes]
Ranks of one host share the monotonic clock. Those of different hosts are aligned by what they did together: an all-reduce cannot
end on one rank before it was submitted on another, and a message is not received before it was sent. Each such pair bounds the
difference of the two clocks from one side. Clocks drift, by up to 50 millionths or 180 ms in an hour, so the difference is a line:
the one that stays furthest from all bounds, and in a short time a constant. Nothing has to be measured while the job runs, and
in the merged trace no effect comes before its cause.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradwire.observe.rings.ring import Record, Ring, message_key
from gradwire.recorder.format import RecordKind

if TYPE_CHECKING:
    import numpy as np

_STEEPEST = 1e-3
"""Clocks do not differ by more than that in speed."""
_SHORT = 60 * 10**9
_SLOPES, _ZOOMS = 33, 9
_MEETING = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "barrier"}
)
_MEETING |= {"reduce_scatter", "reduce_scatter_tensor"}
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


def align(rings: Iterable[Ring]) -> dict[str, Alignment]:
    """The alignment of every host to that of the first ring."""
    headers: dict[str, Mapping[str, Any]] = {}
    for ring in rings:
        headers.setdefault(ring.clock, ring.header)
    hosts = list(headers)
    meetings = _Meetings(rings if len(hosts) > 1 else ())
    found = dict.fromkeys(hosts[:1], Alignment(0, 0))
    reached = hosts[:1]
    for known in reached:  # which grows: a host may be aligned by way of others
        for host in hosts:
            if host in found:
                continue
            after, before = meetings.bounds(known, host), meetings.bounds(host, known)
            if after and before:
                lower = [(end, -more) for _, end, more in after]
                line = fit_line(lower, [(submitted, more) for submitted, _, more in before])
                found[host] = _joined(line, found[known])
                reached.append(host)
    for host in hosts:  # by the wall clock, for want of anything better
        if host not in found:
            first, here = headers[hosts[0]], headers[host]
            offset = (here["started_wall"] - here["started"]) - (first["started_wall"] - first["started"])
            for known in found:  # but not so that a message is received before it was sent
                on_known = found[known].offset
                offset = max([offset, *(on_known - more for *_, more in meetings.bounds(known, host))])
                offset = min([offset, *(on_known + more for *_, more in meetings.bounds(host, known))])
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
    """The line above all of `lower` and below all of `upper`, neither of which is empty, that is furthest from them. For a
    slope, the room between the highest line below and the lowest line above is a concave function: its maximum is found by
    zooming in. If no line keeps all bounds, e.g. because a clock was set, `error` is by how much this one fails."""
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
    return list(on_one_clock(rings, align(rings)))


def on_one_clock(rings: Iterable[Ring], alignments: Mapping[str, Alignment]) -> Iterator[Ring]:
    """The rings with all times on the first host's clock, one after another: all of them may not fit into memory."""
    return (_moved(ring, alignments[ring.clock]) for ring in rings)


def _moved(ring: Ring, alignment: Alignment) -> Ring:
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


_Times = dict[tuple[object, ...], dict[str, int]]
"""By operation and host."""


class _Meetings:
    """What ranks of different hosts did together: when it was submitted on each host, and when it had ended there."""

    def __init__(self, rings: Iterable[Ring]) -> None:
        self._begun: _Times = defaultdict(dict)
        """The last submission."""
        self._ended: _Times = defaultdict(dict)
        """The first end."""
        for ring in rings:
            for record in ring.of_kind(RecordKind.COLLECTIVE_FINISHED):
                if record.op in _MEETING:
                    self._add(ring.clock, record, (record.group_id, record.ordinal))
                elif record.peer >= 0:
                    self._add(ring.clock, record, ("message", *message_key(record)))

    def _add(self, host: str, record: Record, key: tuple[object, ...]) -> None:
        if record.op != "recv":
            begun, submitted = self._begun[key], record.time - record.duration
            begun[host] = max(begun.get(host, submitted), submitted)
        if record.op != "send":
            ended = self._ended[key]
            ended[host] = min(ended.get(host, record.time), record.time)

    def bounds(self, a: str, b: str) -> list[tuple[int, int, int]]:
        """Of operations: when it was submitted on host a, when it had ended on b, and the difference of that, which is at least
        clock(b) - clock(a)."""
        both = ((begun, self._ended[key]) for key, begun in self._begun.items())
        return [(begun[a], ended[b], ended[b] - begun[a]) for begun, ended in both if a in begun and b in ended]

"""Puts the records of several hosts on one clock. Pure.

Note [Clocks from causes]
Ranks of one host share the monotonic clock. Those of different hosts are aligned by what they did together: an all-reduce cannot
end on one rank before it was submitted on another. Each such pair bounds the difference of the two clocks from one side, and the
pairs in the other direction from the other. The middle of what is left is the estimate, half its width the error, which is about
the time that the fastest collective takes. So nothing has to be measured while the job runs, the wall clocks of the hosts need not
agree, and in the merged trace no effect comes before its cause. A message bounds the difference from one side: it is not received
before it was sent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.flight_recorder import RecordKind
from gradwire.observe.ring import Ring

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
    """How the clock of a host becomes that of the first one: add `offset` nanoseconds."""

    offset: int
    error: int
    """At most this wrong, if the clocks run at the same speed. -1: the hosts have nothing in common that would tell."""


def align(rings: Sequence[Ring]) -> dict[str, Alignment]:
    """The alignment of every host to that of the first ring."""
    hosts = list(dict.fromkeys(ring.clock for ring in rings))
    bounds = _bounds(rings)
    aligned = {host: Alignment(0, 0) for host in hosts[:1]}
    while True:
        # A host that shares a group with an aligned one, the best known first.
        candidates = [
            (_width(bounds, known, host), known, host)
            for known in aligned
            for host in hosts
            if host not in aligned and _width(bounds, known, host) < math.inf
        ]
        if not candidates:
            break
        width, known, host = min(candidates)
        low, high = -bounds[known, host], bounds[host, known]  # of clock(known) - clock(host)
        offset = round((low + high) / 2)
        aligned[host] = Alignment(aligned[known].offset + offset, aligned[known].error + math.ceil(max(0.0, width) / 2))
    for ring in rings:  # by the wall clock, for want of anything better
        host = ring.clock
        if host not in aligned:
            first, here = rings[0].header, ring.header
            offset = (here["started_wall"] - here["started"]) - (first["started_wall"] - first["started"])
            for known, alignment in aligned.items():  # but not so that a message is received before it was sent
                low = alignment.offset - bounds.get((known, host), math.inf)
                high = alignment.offset + bounds.get((host, known), math.inf)
                offset = round(max(low, min(offset, high)))
            aligned[host] = Alignment(offset, -1)
    return aligned


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


def _bounds(rings: Sequence[Ring]) -> dict[tuple[str, str], float]:
    """By pair of hosts (a, b): the least seen of "ended on b" - "submitted on a", which is at least clock(b) - clock(a)."""
    begun: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)  # by operation and host: the last submission
    ended: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)  # and the first end
    doubtful = ambiguous_groups(rings)
    twice: set[tuple[str, int]] = set()  # a group was closed, and another of its name counts from 1 again
    for ring in rings:
        host = ring.clock
        seen: set[tuple[str, int]] = set()
        for record in ring.of_kind(RecordKind.COLLECTIVE_FINISHED):
            if record.op in _MEETING and record.group not in doubtful:
                key = record.group, record.ordinal
                if key in seen:
                    twice.add(key)
                seen.add(key)
                submitted = record.time - record.duration
                begun[key][host] = max(begun[key].get(host, submitted), submitted)
                ended[key][host] = min(ended[key].get(host, record.time), record.time)
    bounds = _message_bounds(rings, doubtful)
    for key, submissions in begun.items():
        if key in twice:
            continue
        for a, submitted in submissions.items():
            for b, end in ended[key].items():
                if a != b:
                    bounds[a, b] = min(bounds.get((a, b), math.inf), end - submitted)
    return bounds


def _message_bounds(rings: Sequence[Ring], doubtful: set[str]) -> dict[tuple[str, str], float]:
    """By pair of hosts (a, b): the least seen of "received on b" - "sent on a"."""
    sent: dict[
        tuple[str, int, int, int], tuple[str, int]
    ] = {}  # by group, sender, receiver and message: the host and the time
    received: dict[tuple[str, int, int, int], tuple[str, int]] = {}
    twice: set[tuple[str, int, int, int]] = set()
    for ring in rings:
        for record in ring.of_kind(RecordKind.COLLECTIVE_FINISHED):
            if record.peer < 0 or record.group in doubtful:
                continue
            if record.op == "send":
                table, key, time = (
                    sent,
                    (record.group, record.rank, record.peer, record.message),
                    record.time - record.duration,
                )
            else:
                table, key, time = received, (record.group, record.peer, record.rank, record.message), record.time
            if key in table:
                twice.add(key)
            table[key] = ring.clock, time
    bounds: dict[tuple[str, str], float] = {}
    for key in (sent.keys() & received.keys()) - twice:
        (a, submitted), (b, end) = sent[key], received[key]
        if a != b:
            bounds[a, b] = min(bounds.get((a, b), math.inf), end - submitted)
    return bounds

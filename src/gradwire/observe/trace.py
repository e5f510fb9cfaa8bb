"""One picture of a run: the records of all ranks as a trace in Chrome's JSON format, which Perfetto opens.

A rank is a process of the trace. Its tracks are the phases of its steps, its buckets from full to reduced, and its collectives from
submitted to finished, by group. Arrows lead from a bucket to the collectives of its hook. Counters show the bytes in flight and how
much communication each step had to wait for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gradwire.flight_recorder import RecordKind
from gradwire.observe.clocks import Alignment, align
from gradwire.observe.ring import Record, Ring
from gradwire.observe.steps import Phase, spans

_STEP, _BUCKETS, _WIRE = 1, 10, 100
"""The numbers of tracks: one for the steps; buckets and collectives that overlap need several."""
Event = dict[str, Any]


def write_trace(rings: Sequence[Ring], path: Path) -> int:
    """Write the trace of `rings` to `path`; returns how many events it has."""
    number = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(trace_events(rings), 1):
            file.write((",\n" if number > 1 else "") + json.dumps(event))
        file.write("\n]}\n")
    return number


def trace_events(rings: Sequence[Ring]) -> Iterator[Event]:
    """The events of the trace, on the clock of the first rank's host."""
    alignments = align(rings)
    starts = [_aligned(ring.records[0].time, ring, alignments) for ring in rings if ring.records]
    origin = min(starts, default=0)
    for ring in rings:
        yield from _Rank(ring, origin - alignments[ring.clock].offset).events()


def _aligned(time: int, ring: Ring, alignments: dict[str, Alignment]) -> int:
    return time + alignments[ring.clock].offset


class _Rank:
    """The events of one rank. `origin` is the beginning of the trace on its own clock."""

    def __init__(self, ring: Ring, origin: int) -> None:
        self._ring = ring
        self._origin = origin
        self._flow = 0

    def events(self) -> Iterator[Event]:
        header = self._ring.header
        name = f"rank {self._ring.rank} ({header['host']}, process {self._ring.pid})"
        yield self._meta("process_name", {"name": name})
        yield self._meta("process_sort_index", {"sort_index": self._ring.rank})
        yield from self._steps()
        buckets = list(self._bucket_slices())
        yield from self._tracks("buckets", _BUCKETS, buckets)
        yield from self._collectives(buckets)
        yield from self._instants()

    def _steps(self) -> Iterator[Event]:
        yield self._meta("thread_name", {"name": "step"}, _STEP)
        for span in spans(self._ring.records):
            yield self._slice(_STEP, span.phase.value, span.start, span.end, {"step": span.step})
            if span.phase is Phase.EXPOSED:
                yield self._counter("exposed communication (ms)", span.end, span.seconds * 1e3)

    def _bucket_slices(self) -> Iterator[_Slice]:
        """From full to reduced."""
        full: dict[tuple[str, int, int], Record] = {}
        for record in self._ring.of_kind(RecordKind.BUCKET_FULL, RecordKind.BUCKET_REDUCED):
            key = record.group, record.step, record.bucket
            if record.kind is RecordKind.BUCKET_FULL:
                full[key] = record
            elif key in full:
                first = full.pop(key)
                arguments = {"step": record.step, "bytes": record.nbytes, "group": record.group}
                yield _Slice(f"bucket {record.bucket}", first.time, record.time, arguments)

    def _collectives(self, buckets: Sequence[_Slice]) -> Iterator[Event]:
        places = {(s.arguments["step"], s.name): s for s in buckets}
        submitted: dict[tuple[str, int, int], Record] = {}
        slices: dict[str, list[_Slice]] = {}
        changes: list[tuple[int, int]] = []
        for record in self._ring.records:
            key = record.group, record.rank, record.seq
            if record.kind is RecordKind.COLLECTIVE_SUBMITTED:
                submitted[key] = record
            elif record.kind in (RecordKind.COLLECTIVE_FINISHED, RecordKind.COLLECTIVE_FAILED):
                first = submitted.pop(key, record)
                start = record.time - record.duration
                arguments = {"sequence number": record.seq, "bytes": record.nbytes, "label": record.label}
                bucket = places.get((first.step, f"bucket {first.bucket}"))
                failed = " failed" if record.kind is RecordKind.COLLECTIVE_FAILED else ""
                if bucket is not None:
                    arguments |= {"step": first.step, "bucket": first.bucket}
                slices.setdefault(record.group, []).append(
                    _Slice(f"{record.op}{failed}", start, record.time, arguments, bucket)
                )
                changes += [(start, record.nbytes), (record.time, -record.nbytes)]
        end = self._ring.records[-1].time if self._ring.records else 0
        for record in submitted.values():  # not finished yet, or never
            arguments = {"sequence number": record.seq, "bytes": record.nbytes, "label": record.label}
            slices.setdefault(record.group, []).append(
                _Slice(f"{record.op} (not finished)", record.time, max(record.time, end), arguments)
            )
        for number, (group, found) in enumerate(sorted(slices.items())):
            yield from self._tracks(f"wire: {group}", _WIRE * (number + 1), found)
        total = 0
        for time, change in sorted(changes):
            total += change
            yield self._counter("bytes in flight", time, total)

    def _instants(self) -> Iterator[Event]:
        kinds = {RecordKind.MARK: "mark", RecordKind.STEP_FAILED: "step failed", RecordKind.WARNING: "warning"}
        for record in self._ring.of_kind(*kinds):
            name = record.label or kinds[record.kind]
            yield self._event("i", _STEP, record.time) | {"name": name, "s": "p", "cat": kinds[record.kind]}

    def _tracks(self, name: str, first: int, slices: Iterable[_Slice]) -> Iterator[Event]:
        """`slices` on as many tracks as they need in order not to overlap, with the arrows that lead to them."""
        ends: list[int] = []
        for piece in sorted(slices, key=lambda piece: piece.start):
            track = next((i for i, end in enumerate(ends) if end <= piece.start), len(ends))
            if track == len(ends):
                ends.append(0)
                yield self._meta("thread_name", {"name": name}, first + track)
            ends[track] = piece.end
            piece.track = first + track
            yield self._slice(piece.track, piece.name, piece.start, piece.end, piece.arguments)
            if piece.cause is not None:
                self._flow += 1
                flow = {"name": "hook", "cat": "hook", "id": f"{self._ring.rank}.{self._flow}"}
                yield (
                    self._event("s", piece.cause.track, max(piece.cause.start, min(piece.start, piece.cause.end)))
                    | flow
                )
                yield self._event("f", piece.track, piece.start) | flow | {"bp": "e"}

    # -- the format ------------------------------------------------------------------------------------------------------

    def _event(self, phase: str, track: int, time: int) -> Event:
        return {"ph": phase, "pid": self._ring.rank, "tid": track, "ts": (time - self._origin) / 1e3}

    def _slice(self, track: int, name: str, start: int, end: int, arguments: dict[str, Any]) -> Event:
        return self._event("X", track, start) | {"name": name, "dur": (end - start) / 1e3, "args": arguments}

    def _counter(self, name: str, time: int, value: float) -> Event:
        return self._event("C", 0, time) | {"name": name, "args": {"value": value}}

    def _meta(self, name: str, arguments: dict[str, Any], track: int = 0) -> Event:
        return {"ph": "M", "pid": self._ring.rank, "tid": track, "name": name, "args": arguments}


class _Slice:
    """Something with a beginning and an end, on a track yet to be found."""

    def __init__(self, name: str, start: int, end: int, arguments: dict[str, Any], cause: _Slice | None = None) -> None:
        self.name, self.start, self.end = name, start, end
        self.arguments = arguments
        self.cause = cause
        """The slice from which an arrow leads here."""
        self.track = 0

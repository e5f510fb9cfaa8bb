"""What a trace shows of each rank, whatever its format: tracks of slices, arrows between them, counters, notes. Pure.

The tracks of a rank are the phases of its steps, its buckets from full to averaged, the hooks that reduce them, and its operations
by group. Arrows lead from a bucket to its hook, and from the hook to its operations. Slices that overlap are on several tracks of
the same name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.observe.rings.clocks import aligned
from gradwire.observe.rings.intervals import BucketSpan, Operation, bucket_spans, operations, ranks_apart
from gradwire.observe.rings.ring import Ring
from gradwire.observe.stragglers.steps import Phase, spans
from gradwire.recorder.format import RecordKind

_NOTES = {RecordKind.MARK: "mark", RecordKind.STEP_FAILED: "step failed", RecordKind.WARNING: "warning"}


@dataclass(slots=True)
class Slice:
    """Something with a beginning and an end, in nanoseconds from the beginning of the trace."""

    name: str
    start: int
    end: int
    arguments: dict[str, Any]
    cause: Slice | None = None
    """The slice from which an arrow leads here."""
    inner: list[Slice] = field(default_factory=list)
    """Parts of it, one after another."""


@dataclass(frozen=True, slots=True)
class Track:
    """Slices one after another."""

    name: str
    slices: list[Slice]


@dataclass(frozen=True, slots=True)
class Note:
    """A point in time."""

    time: int
    name: str
    category: str


@dataclass(frozen=True, slots=True)
class RankTracks:
    """Everything of one rank."""

    rank: int
    name: str
    tracks: list[Track]
    """In the order in which they are shown; the first is that of the steps."""
    counters: dict[str, list[tuple[int, float]]]
    notes: list[Note]


def rank_tracks(rings: Sequence[Ring]) -> Iterator[RankTracks]:
    """The tracks of each rank, on the clock of the first rank's host."""
    rings = aligned(ranks_apart(rings))
    origin = beginning(rings)
    for ring in rings:
        yield _of_rank(ring, origin)


def beginning(rings: Sequence[Ring]) -> int:
    """The beginning of the trace of these rings, which are on one clock."""
    return min((r.time - r.duration for ring in rings for r in ring.records), default=0)


def _of_rank(ring: Ring, origin: int) -> RankTracks:
    """`origin` is the beginning of the trace."""
    end = max((record.time for record in ring.records), default=origin) - origin
    steps = [Slice(s.phase.value, s.start - origin, s.end - origin, {"step": s.step}) for s in spans(ring.records)]
    exposed = [(s.end, (s.end - s.start) / 1e6) for s in steps if s.name == Phase.EXPOSED.value]
    found = operations(ring.records)
    buckets, hooks, wire = _pictures(bucket_spans(ring.records), found, origin, end)
    tracks = [Track("step", steps), *_apart("buckets", buckets), *_apart("hook", hooks)]
    for group, slices in sorted(wire.items()):
        tracks += _apart(f"wire: {group}", slices)
    return RankTracks(
        ring.rank,
        f"rank {ring.rank} ({ring.header['host']}, process {ring.pid})",
        tracks,
        {
            "bytes in flight": list(_bytes_in_flight(found, origin)),
            "bytes communicated": list(_bytes_communicated(found, origin)),
            "exposed communication (ms)": exposed,
        },
        [Note(r.time - origin, r.label or _NOTES[r.kind], _NOTES[r.kind]) for r in ring.of_kind(*_NOTES)],
    )


def _pictures(
    buckets: Sequence[BucketSpan], found: Sequence[Operation], origin: int, end: int
) -> tuple[list[Slice], list[Slice], dict[str, list[Slice]]]:
    """The slices of buckets, hooks and operations."""
    of_bucket: dict[tuple[int, int, int], list[Operation]] = {}
    for operation in found:
        if operation.bucket >= 0:
            of_bucket.setdefault((operation.model, operation.step, operation.bucket), []).append(operation)
    bucket_slices, hook_slices, hook_of = [], [], {}
    for one in buckets:
        if one.reduced is None:
            continue
        arguments = {"step": one.step, "bucket": one.bucket, "bytes": one.nbytes, "group": one.group}
        bucket = Slice(f"bucket {one.bucket}", one.full - origin, one.reduced - origin, arguments)
        own = of_bucket.get((one.model, one.step, one.bucket), [])
        own = [operation for operation in own if one.full <= operation.submitted <= one.reduced]
        bucket_slices.append(bucket)
        hook = _hook(one, own, bucket, origin)
        hook_slices.append(hook)
        hook_of.update({id(operation): hook for operation in own})
    wire: dict[str, list[Slice]] = {}
    for operation in found:
        wire.setdefault(operation.group, []).append(_wire(operation, hook_of.get(id(operation)), origin, end))
    return bucket_slices, hook_slices, wire


def _hook(one: BucketSpan, own: Sequence[Operation], bucket: Slice, origin: int) -> Slice:
    """The hook of a bucket, with the stages between its operations: what it computes itself."""
    ends = [operation.ended for operation in own if operation.ended is not None]
    stop = max([*ends, one.launched or one.full]) - origin
    arguments = {"step": one.step, "bucket": one.bucket}
    hook = Slice(one.hook or "hook", bucket.start, min(stop, bucket.end), arguments, bucket)
    reached = bucket.start
    for number, operation in enumerate(own):
        start = operation.submitted - origin
        if start > reached:
            hook.inner.append(Slice(f"stage {number + 1}", reached, start, arguments))
        reached = max(reached, min(hook.end, (operation.ended or one.full) - origin))
    return hook


def _wire(operation: Operation, cause: Slice | None, origin: int, end: int) -> Slice:
    arguments: dict[str, Any] = {"sequence number": operation.seq, "bytes": operation.nbytes, "label": operation.label}
    if operation.bucket >= 0:
        arguments |= {"step": operation.step, "bucket": operation.bucket}
    if operation.peer >= 0:
        arguments["peer"] = operation.peer
    if operation.error:
        arguments["error"] = operation.error
    start = operation.submitted - origin
    if operation.ended is None:
        return Slice(f"{operation.op} (not finished)", start, max(start, end), arguments, cause)
    return Slice(
        f"{operation.op}{' failed' if operation.error else ''}", start, operation.ended - origin, arguments, cause
    )


def _apart(name: str, slices: Iterable[Slice]) -> list[Track]:
    """`slices` on as many tracks as they need in order not to overlap."""
    tracks: list[Track] = []
    for piece in sorted(slices, key=lambda piece: piece.start):
        track = next((track for track in tracks if track.slices[-1].end <= piece.start), None)
        if track is None:
            track = Track(name, [])
            tracks.append(track)
        track.slices.append(piece)
    return tracks


def _bytes_in_flight(found: Iterable[Operation], origin: int) -> Iterator[tuple[int, float]]:
    changes = sorted(
        change
        for one in found
        if one.ended is not None
        for change in ((one.submitted - origin, one.nbytes), (one.ended - origin, -one.nbytes))
    )
    times, amounts = [time for time, _ in changes], [amount for _, amount in changes]
    return zip(times, itertools.accumulate(amounts), strict=True)


def _bytes_communicated(found: Iterable[Operation], origin: int) -> Iterator[tuple[int, float]]:
    ends = sorted((one.ended - origin, one.nbytes) for one in found if one.ended is not None and not one.error)
    return zip((time for time, _ in ends), itertools.accumulate(nbytes for _, nbytes in ends), strict=True)

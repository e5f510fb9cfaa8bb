"""From records to what lasts: operations from submitted to finished, buckets from full to reduced. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradwire.observe.rings.ring import Record, Ring
from gradwire.recorder.format import RecordKind


@dataclass(slots=True)
class Operation:
    """A collective, a send or a receive on one rank. Times are in nanoseconds on the rank's clock."""

    record: Record
    """Its submission, or the first record of it that is known."""
    submitted: int
    ended: int | None = None
    """None: not yet."""
    error: str = ""
    """Why it failed."""


@dataclass(slots=True)
class BucketSpan:
    """A bucket in one step on one rank. Times are in nanoseconds on the rank's clock."""

    record: Record
    """Of when all its gradients were there."""
    launched: int | None = None
    reduced: int | None = None
    """When its averages were in `.grad`. None: not yet."""
    hook: str = ""


def operations(records: Iterable[Record]) -> list[Operation]:
    """The operations in `records`, in the order of their submission. The submission of an operation may have been overwritten,
    or not recorded because it ended within it: then it is calculated from the end and the duration."""
    found: list[Operation] = []
    pending: dict[tuple[int, int, int], Operation] = {}
    for record in records:
        kind = record.kind
        if kind > RecordKind.COLLECTIVE_FAILED:
            continue
        key, failed = record.operation, kind is RecordKind.COLLECTIVE_FAILED
        known = None if kind is RecordKind.COLLECTIVE_SUBMITTED else pending.get(key)
        if known is None:
            own = record._replace(label="") if failed else record  # whose label is the error
            known = pending[key] = Operation(own, record.time - record.duration)
            found.append(known)
        if failed or kind is RecordKind.COLLECTIVE_FINISHED:
            known.ended = record.time
            known.error = (record.label or "failed") if failed else ""
            del pending[key]
    return sorted(found, key=lambda one: one.submitted)


def bucket_spans(records: Iterable[Record]) -> list[BucketSpan]:
    """The buckets in `records` whose filling was recorded, in that order."""
    found: list[BucketSpan] = []
    latest: dict[tuple[int, int, int, int, int], BucketSpan] = {}
    for record in records:
        key = record.group_id, record.model, record.rank, record.step, record.bucket
        if record.kind is RecordKind.BUCKET_FULL:
            latest[key] = BucketSpan(record)
            found.append(latest[key])
        elif record.kind is RecordKind.BUCKET_LAUNCHED and key in latest:
            latest[key].launched, latest[key].hook = record.time, record.label
        elif record.kind is RecordKind.BUCKET_REDUCED and key in latest:
            latest.pop(key).reduced = record.time
    return found


def free_lane(lanes: list[int], start: int, end: int) -> int:
    """The first of `lanes`, by when each is free, in which something can be drawn from `start` to `end`; takes it, or a new one."""
    lane = next((i for i, free in enumerate(lanes) if free <= start), len(lanes))
    lanes[lane : lane + 1] = [end]
    return lane


def ranks_apart(rings: Sequence[Ring]) -> list[Ring]:
    """A ring for each rank, also if ranks are threads of one process, which writes one ring. Records that do not name a rank of
    the common group, e.g. of optimizers, belong to the rank of their thread."""
    if len(rings) != 1:
        return list(rings)
    [ring] = rings
    ranks: dict[int, set[int]] = {}
    for record in ring.records:
        if record.group_id:
            ranks.setdefault(record.group_id, set()).add(record.rank)
    shared = max(ranks, key=lambda group: len(ranks[group]), default=0)
    if len(ranks.get(shared, ())) < 2:
        return [ring]
    of_thread = {record.thread: record.rank for record in reversed(ring.records) if record.group_id == shared}
    apart: dict[int, list[Record]] = {rank: [] for rank in sorted(ranks[shared])}
    for record in ring.records:
        rank = record.rank if record.group_id == shared else of_thread.get(record.thread, min(apart))
        apart[rank].append(record)
    size = max(len(apart), int(ring.header["size"]))
    return [replace(ring, header={**ring.header, "rank": r, "size": size}, records=own) for r, own in apart.items()]

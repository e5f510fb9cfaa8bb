"""From records to what lasts: operations from submitted to finished, buckets from full to reduced. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gradwire.observe.rings.ring import Record, Ring
from gradwire.recorder.format import RecordKind


@dataclass(slots=True)
class Operation:
    """A collective, a send or a receive on one rank. Times are in nanoseconds on the rank's clock."""

    op: str
    group: str
    rank: int
    """The rank in `group`."""
    seq: int
    ordinal: int
    """0 for sends and receives."""
    label: str
    nbytes: int
    step: int
    bucket: int
    submitted: int
    started: int | None = None
    """None: not yet, or the engine does not say."""
    ended: int | None = None
    """None: not yet."""
    error: str = ""
    """Why it failed."""
    peer: int = -1
    """The other rank of a send or a receive, -1 if it is not known."""
    message: int = -1
    group_id: int = 0
    model: int = 0
    on_device: bool = False
    """Whether its tensors are in the memory of a device, as far as its submission was recorded."""

    @property
    def duration(self) -> int:
        """From its submission to its end; 0 if it has none."""
        return 0 if self.ended is None else self.ended - self.submitted


@dataclass(slots=True)
class BucketSpan:
    """A bucket in one step on one rank. Times are in nanoseconds on the rank's clock."""

    group: str
    rank: int
    step: int
    bucket: int
    nbytes: int
    full: int
    """When all its gradients were there."""
    launched: int | None = None
    reduced: int | None = None
    """When its averages were in `.grad`. None: not yet."""
    hook: str = ""
    model: int = 0
    """See `Record.model`."""


def operations(records: Iterable[Record]) -> list[Operation]:
    """The operations in `records`, in the order of their submission.

    The submission of an operation may have been overwritten, or not recorded because it ended within it: then it is calculated
    from the end and the duration.
    """
    found: list[Operation] = []
    pending: dict[tuple[int, int, int], Operation] = {}
    for record in records:
        kind = record.kind
        if kind > RecordKind.COLLECTIVE_FAILED:
            continue
        key = record.group_id, record.rank, record.seq
        if kind is RecordKind.COLLECTIVE_SUBMITTED:
            pending[key] = one = _operation(record, record.time)
            found.append(one)
            continue
        known = pending.get(key)
        if known is None:
            known = _operation(record, record.time - record.duration)
            if kind is RecordKind.COLLECTIVE_FAILED:
                known.label = ""  # that of the record is the error
            pending[key] = known
            found.append(known)
        if kind is RecordKind.COLLECTIVE_STARTED:
            known.started = record.time
        else:
            known.ended = record.time
            known.error = (record.label or "failed") if kind is RecordKind.COLLECTIVE_FAILED else ""
            del pending[key]
    return sorted(found, key=lambda one: one.submitted)


def _operation(record: Record, submitted: int) -> Operation:
    return Operation(
        record.op,
        record.group,
        record.rank,
        record.seq,
        record.ordinal,
        record.label,
        record.nbytes,
        record.step,
        record.bucket,
        submitted,
        peer=record.peer,
        message=record.message,
        group_id=record.group_id,
        model=record.model,
        on_device=record.on_device,
    )


def bucket_spans(records: Iterable[Record]) -> list[BucketSpan]:
    """The buckets in `records` whose filling was recorded, in that order."""
    found: list[BucketSpan] = []
    latest: dict[tuple[int, int, int, int, int], BucketSpan] = {}
    for record in records:
        key = record.group_id, record.model, record.rank, record.step, record.bucket
        if record.kind is RecordKind.BUCKET_FULL:
            place = record.group, record.rank, record.step, record.bucket
            latest[key] = one = BucketSpan(*place, record.nbytes, record.time, model=record.model)
            found.append(one)
        elif record.kind is RecordKind.BUCKET_LAUNCHED and key in latest:
            latest[key].launched, latest[key].hook = record.time, record.label
        elif record.kind is RecordKind.BUCKET_REDUCED and key in latest:
            latest.pop(key).reduced = record.time
    return found


def ranks_apart(rings: Sequence[Ring]) -> list[Ring]:
    """A ring for each rank, also if ranks are threads of one process, which writes one ring.

    Records that do not name a rank of the common group, e.g. of optimizers, belong to the rank of their thread.
    """
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
    return [
        replace(ring, header={**ring.header, "rank": r, "size": size}, records=own, part_of=ring)
        for r, own in apart.items()
    ]

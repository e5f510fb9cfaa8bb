"""Records written by hand, to a real ring."""

import zlib

from gradwire.recorder.format import NO_PEER, RecordKind
from gradwire.recorder.writer import FlightRecorder, Place, RankInGroup


def group_id_of(group: str) -> int:
    """The identity of a group that is made up: all tests' groups of one name are one."""
    return zlib.crc32(group.encode()) if group else 0


def put(
    recorder: FlightRecorder,
    kind: RecordKind,
    rank: int = 0,
    *,
    at: float | None = None,
    op: int = 0,
    group: str = "",
    group_id: int | None = None,
    label: str = "",
    seq: int = 0,
    ordinal: int = 0,
    peer: int = NO_PEER,
    nbytes: int = 0,
    duration: float = 0.0,
    step: int | None = None,
    bucket: int | None = None,
    model: int = 0,
) -> None:
    """Write a record; its step and bucket are those of the thread unless one is given."""
    place = None
    if step is not None or bucket is not None:
        place = Place(-1 if step is None else step, -1 if bucket is None else bucket, model)
    identity = group_id_of(group) if group_id is None else group_id
    member = RankInGroup(identity, recorder.number_of(group), rank)
    recorder.put(kind, member, (op, seq, ordinal, peer, duration, at), label=label, nbytes=nbytes, place=place)

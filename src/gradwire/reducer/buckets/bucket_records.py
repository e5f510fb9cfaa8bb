"""What the flight recorder learns of buckets: when each is full, launched and reduced, and which parameters it holds."""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec
from gradwire.recorder import flight_recorder
from gradwire.recorder.flight_recorder import FlightRecorder, RecordKind

_MOST_NAMES = 5000


def record_bucket(kind: RecordKind, group: Group, spec: BucketSpec, *, step: int, hook: str = "") -> None:
    """Write what happened to a bucket to the flight recorder, if there is one."""
    recorder = flight_recorder.active
    if recorder is not None:
        recorder.put(kind, group.rank, group=group.name, label=hook, nbytes=spec.nbytes, step=step, bucket=spec.index)


def describe_buckets(recorder: FlightRecorder, group: Group, buckets: Iterable[BucketSpec]) -> None:
    """Write which parameters the buckets of a model hold."""
    specs = list(buckets)
    few = sum(len(spec.names) for spec in specs) <= _MOST_NAMES
    facts = [
        {
            "bytes": spec.nbytes,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "device": str(spec.device),
            "parameters": len(spec.names),
            "names": list(spec.names) if few else list(spec.names[:1]),
        }
        for spec in specs
    ]
    recorder.describe("buckets", {"group": group.name, "rank": group.rank, "buckets": facts})

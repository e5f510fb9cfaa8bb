"""`ModelEvents`: what happens to one model on one rank, for the flight recorder and for listeners."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from gradwire.events import Event
from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.recorder.source import EventSource
from gradwire.recorder.writer import Place
from gradwire.reducer.buckets.layout import BucketLayout

_MOST_NAMES = 5000


class ModelEvents(EventSource):
    """The events of one model, which is number `model` of those over its group."""

    __slots__ = ("_described", "model")

    def __init__(self, group: Group) -> None:
        super().__init__("", 0, 0)
        self.move_to_group(group)

    def move_to_group(self, group: Group) -> None:
        """The model is one of this group from the next record on."""
        ledger = group.ledger
        self.name, self.rank = ledger.name, ledger.rank
        self.identify(ledger.events.group_id)
        ledger.models += 1
        self.model = ledger.models
        self._described: tuple[object, object] = (None, None)
        """The recorder that has the layout, and that layout."""

    def place(self, step: int, bucket: int = -1) -> Place:
        """Where records of this model's collectives belong: see `writer.within`."""
        return Place(step, bucket, self.model)

    def record(
        self,
        kind: RecordKind,
        step: int,
        *,
        spec: BucketSpec | None = None,
        label: str = "",
        event: Callable[[float, int], Event] | None = None,
    ) -> None:
        """Something happened in a step, or in it to the bucket of this `spec`. `event(time, rank)` makes what listeners get."""
        if event is not None:
            self.emit_now(event)
        recorder = writer.active
        if recorder is not None:
            bucket, nbytes = (-1, 0) if spec is None else (spec.index, spec.nbytes)
            place = self.place(step, bucket)
            recorder.put(kind, self.member(recorder), label=label, nbytes=nbytes, place=place)

    @contextlib.contextmanager
    def reduction(self, spec: BucketSpec, step: int, *, hook: str) -> Iterator[None]:
        """Around the reduction of a bucket that no `Reducer` launches."""
        self.record(RecordKind.BUCKET_FULL, step, spec=spec)
        self.record(RecordKind.BUCKET_LAUNCHED, step, spec=spec, label=hook)
        with writer.within(self.place(step, spec.index)):
            yield
        self.record(RecordKind.BUCKET_REDUCED, step, spec=spec)

    def emit_now(self, event: Callable[[float, int], Event]) -> None:
        """Something happened that is not recorded: `event(time, rank)`, for listeners."""
        if self:
            self.emit(event(time.perf_counter(), self.rank))

    def describe(self, layout: BucketLayout) -> None:
        """Let the recorder know which parameters the buckets hold, once for each recorder and layout."""
        recorder = writer.active
        if recorder is None or (self._described[0] is recorder and self._described[1] is layout):
            return
        self._described = recorder, layout
        specs = layout.buckets
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
        names = {"group": self.name, "group_id": self.group_id, "model": self.model, "rank": self.rank}
        recorder.describe("buckets", {**names, "buckets": facts})

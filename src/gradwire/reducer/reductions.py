"""Reductions: what happens to the buckets of one step, from their launch to the averages in `.grad`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from operator import attrgetter, is_
from typing import Protocol

import torch
from torch import Tensor

from gradwire.errors import GradwireError
from gradwire.events import BucketFull, BucketLaunched, BucketReduced, Emitter
from gradwire.groups.base import Group
from gradwire.hooks.bucket import GradBucket
from gradwire.recorder import flight_recorder
from gradwire.recorder.flight_recorder import RecordKind
from gradwire.reducer.buckets.bucket_records import describe_buckets, record_bucket
from gradwire.reducer.buckets.buffers import Buckets, all_there
from gradwire.reducer.hook.driver import Pending
from gradwire.reducer.intake.arrivals import GradListener
from gradwire.reducer.machine import Launch

_LAUNCHED = RecordKind.BUCKET_LAUNCHED
_version: Callable[[Tensor | None], int] = attrgetter("_version")


class StepRejected(Exception):
    """Returned by `Runner.verify`, on every rank alike: the step is dropped, and the group stays as it is."""

    def __init__(self, error: GradwireError) -> None:
        super().__init__(str(error))
        self.error = error


class StepSkipped(StepRejected):
    """As StepRejected, but nothing is raised: gradients become None, so that the optimizer does nothing."""


class Runner(Protocol):
    """What reduces buckets: a HookRunner, or a wrapper around one."""

    @property
    def name(self) -> str:
        """The hook, for people."""

    def start(self, bucket: GradBucket) -> Pending:
        """Start the reduction of a bucket."""

    def verify(self, step: int) -> Exception | None:
        """Check the results of iteration `step` before any of them is used. Returns the error that drops the step, if any.

        Called when all reductions are over: a check that communicated earlier would meet other buckets' collectives in
        another order on another rank.
        """

    def drop_step(self) -> None:
        """Forget the checks of a step that has ended or failed."""

    def buckets_changed(self) -> None:
        """Parameters are in other buckets from the next step on."""


class Reductions:
    """The reductions of one model's buckets."""

    def __init__(self, group: Group, runner: Runner, buckets: Buckets, listener: GradListener, events: Emitter) -> None:
        self.group = group
        self.runner = runner
        self.unused: Collection[int] = ()
        """Parameters that no rank uses in this step: buckets of none but these are not reduced."""
        self.held: Launch | None = None
        """A bucket that is to be launched when backward has ended."""
        self.number = 0
        """How many buckets were reduced in the last step."""
        self.step = 0
        """The iteration, as records and errors count them."""
        self._buckets = buckets
        self._listener = listener
        self._events = events
        self._launched = LaunchedGradients()
        self._pending: list[tuple[Launch, Pending]] = []
        self._described: tuple[object, object] = (None, None)
        """The recorder that has the layout, and that layout."""

    def hold(self, launch: Launch) -> None:
        """Launch this bucket when backward has ended."""
        self.held = launch
        self._listener.polled.pop(launch.bucket, None)  # its gradients are looked at again then
        self._listener.compiled.use_accumulated(self._buckets.layout.members[launch.bucket])

    def launch(self, launches: Sequence[Launch]) -> None:
        """Start the reductions of these buckets."""
        with torch.no_grad():
            for launch in launches:
                if not self.unused or not set(self._buckets.layout.members[launch.bucket]).issubset(self.unused):
                    self._pending.append((launch, self._launch(launch)))

    def launch_held(self) -> None:
        """Backward has ended."""
        if self.held is not None:
            self.launch([self.held])
            self.held = None

    def _launch(self, launch: Launch) -> Pending:
        buckets, listening, bucket = self._buckets, self._listener.listening, launch.bucket
        parameters, spec = buckets.parameters[bucket], buckets.storages[bucket].spec
        gradients = self._listener.gradients(bucket, parameters)
        if listening.watching and not spec.sparse:  # a sparse gradient is alone in its bucket, so its hook always calls
            if not all_there(gradients):
                listening.mark_irregular()
            elif launch is not self.held:
                self._launched.add(bucket, parameters, gradients)
            elif not self._events:  # after backward has ended only a listener could still replace them
                self._launched.keep(bucket, gradients)
        buffer = buckets.fill(bucket, gradients, self.group, new=listening.polling)
        if self._events:
            self._events.emit(BucketFull(time.perf_counter(), self.group.rank, bucket, spec.names, buffer.numel()))
        self._record(RecordKind.BUCKET_FULL, bucket)
        with flight_recorder.within(self.step, bucket):
            pending = self.runner.start(buckets.as_grad_bucket(bucket, buffer, last=launch.last))
        if self._events:
            self._events.emit(BucketLaunched(time.perf_counter(), self.group.rank, bucket))
        self._record(RecordKind.BUCKET_LAUNCHED, bucket)
        return pending

    def wait(self) -> list[tuple[int, Tensor]]:
        """The results by bucket, once all reductions are over."""
        results = [(launch.bucket, pending.wait()) for launch, pending in self._pending]
        self.number = len(results)
        return results

    def changed(self) -> list[Tensor]:
        """Parameters whose gradients have changed since their buckets were launched, which was too early then."""
        return self._launched.changed()

    def verify(self, step: int) -> None:
        """Raise what `Runner.verify` returns."""
        error = self.runner.verify(step)
        if error is not None:
            raise error

    def put_back(self, results: Sequence[tuple[int, Tensor]], unused: Collection[int], *, leave: bool) -> None:
        """Make the averages the gradients, except those of parameters that no rank has used; or leave all as they are."""
        if not leave:
            now, parameters = self._launched.now, self._buckets.parameters
            rows = [(bucket, result, now(bucket, parameters[bucket])) for bucket, result in results]
            self._buckets.put_back(rows, unused)
        for bucket, _ in results:
            if self._events:
                self._events.emit(BucketReduced(time.perf_counter(), self.group.rank, bucket))
            self._record(RecordKind.BUCKET_REDUCED, bucket)
            self._buckets.release(bucket)

    def _record(self, kind: RecordKind, bucket: int) -> None:
        recorder, layout = flight_recorder.active, self._buckets.layout
        if recorder is None:
            return
        if self._described[0] is not recorder or self._described[1] is not layout:
            self._described = recorder, layout
            describe_buckets(recorder, self.group, layout.buckets)
        hook = self.runner.name if kind is _LAUNCHED else ""
        record_bucket(kind, self.group, self._buckets.storages[bucket].spec, step=self.step, hook=hook)

    def drop(self) -> None:
        """Forget what is in flight."""
        self._listener.polled.clear()
        self._pending.clear()
        self.held = None
        self.runner.drop_step()

    def forget_gradients(self) -> None:
        """Let go of the gradients of launched buckets."""
        self._launched.clear()


class LaunchedGradients:
    """The gradients with which buckets were launched, and their versions then."""

    def __init__(self) -> None:
        self._launched: dict[int, tuple[Sequence[Tensor], Sequence[Tensor | None], list[int]]] = {}
        self._now: dict[int, list[Tensor | None]] = {}

    def add(self, bucket: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """A bucket is launched with these gradients, none of which is None."""
        self._launched[bucket] = parameters, gradients, list(map(_version, gradients))

    def keep(self, bucket: int, gradients: list[Tensor | None]) -> None:
        """A bucket is launched after backward has ended, with these gradients."""
        self._now[bucket] = gradients

    def changed(self) -> list[Tensor]:
        """Parameters whose gradients are not those that were launched."""
        found: list[Tensor] = []
        for bucket, (parameters, gradients, versions) in self._launched.items():
            now = self._now[bucket] = [p.grad for p in parameters]
            if not all(map(is_, now, gradients)) or list(map(_version, now)) != versions:
                rows = zip(parameters, now, gradients, versions, strict=True)
                found += [p for p, g, launched, v in rows if g is not launched or (g is not None and g._version != v)]
        self._launched.clear()
        return found

    def now(self, bucket: int, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of a bucket at the end of backward: those that `keep` got or `changed` has found, if they have."""
        return self._now.pop(bucket, None) or [p.grad for p in parameters]

    def clear(self) -> None:
        """Let go of the gradients."""
        self._launched.clear()
        self._now.clear()

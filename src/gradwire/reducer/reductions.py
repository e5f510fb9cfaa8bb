"""Reductions: what happens to the buckets of one step, from their launch to the averages in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from gradwire.events import BucketFull, BucketLaunched, BucketReduced
from gradwire.groups.base import Group
from gradwire.hooks.bucket import GradBucket
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.reducer.buckets.buffers import BucketBuffers
from gradwire.reducer.checks.nonfinite import NonFiniteChecked
from gradwire.reducer.hook.driver import Pending
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.intake.intake import GradientIntake
from gradwire.reducer.machine import Launch
from gradwire.reducer.model_events import ModelEvents

Runner = HookRunner | NonFiniteChecked
"""What reduces buckets. `verify` is called when all reductions of a step are over: a check that communicated earlier would meet
other buckets' collectives in another order on another rank."""


class Reductions:
    """The reductions of one model's buckets."""

    def __init__(
        self, group: Group, runner: Runner, buckets: BucketBuffers, intake: GradientIntake, events: ModelEvents
    ) -> None:
        self.group = group
        self.runner = runner
        self.unused: Collection[int] = ()
        """Parameters that no rank uses in this step: buckets of none but these are not reduced."""
        self.held: Launch | None = None
        """A bucket that is to be launched when backward has ended."""
        self.first_nonfinite: Callable[[GradBucket, Group, int], object] | None = None
        """Called with each bucket before its reduction, its group and the step, while a flight recorder is active."""
        self.number = 0
        """How many buckets were reduced in the last step."""
        self.step = 0
        """The iteration, as records and errors count them."""
        self._buckets = buckets
        self._intake = intake
        self._events = events
        self._pending: list[tuple[Launch, Pending]] = []

    def hold(self, launch: Launch) -> None:
        self.held = launch
        self._intake.compiled.use_accumulated(self._buckets.layout.members[launch.bucket])

    def launch(self, launches: Sequence[Launch]) -> None:
        if torch.is_grad_enabled():  # as it is not in a backward, and to enter no_grad costs as much as ten calls
            with torch.no_grad():
                self.launch(launches)
            return
        for launch in launches:
            if not self.unused or not set(self._buckets.layout.members[launch.bucket]).issubset(self.unused):
                self._pending.append((launch, self._launch(launch)))

    def _launch(self, launch: Launch) -> Pending:
        buckets, bucket = self._buckets, launch.bucket
        gradients = self._intake.gradients(buckets.layout.members[bucket])
        full = buckets.fill(bucket, gradients, self.group, last=launch.last, unused=self._intake.machine.unused)
        if writer.active is None and not self._events:
            return self.runner.start(full)
        return self._launch_watched(full)

    def _launch_watched(self, full: GradBucket) -> Pending:
        """Launch a bucket where there is a recorder or a listener."""
        events, step, spec, bucket = self._events, self.step, full.spec, full.index()
        events.describe(self._buckets.layout)
        filled = partial(BucketFull, bucket=bucket, parameters=spec.names, numel=full.buffer().numel())
        events.record(RecordKind.BUCKET_FULL, step, spec=spec, event=filled)
        if self.first_nonfinite is not None and writer.active is not None:
            self.first_nonfinite(full, self.group, step)
        with writer.within(events.place(step, bucket)):
            pending = self.runner.start(full)
        hook, launched = "" if writer.active is None else self.runner.name, partial(BucketLaunched, bucket=bucket)
        events.record(RecordKind.BUCKET_LAUNCHED, step, spec=spec, label=hook, event=launched)
        return pending

    def wait(self) -> list[tuple[int, Tensor]]:
        results = [(launch.bucket, pending.wait()) for launch, pending in self._pending]
        self.number = len(results)
        return results

    def put_back(self, results: Sequence[tuple[int, Tensor]], unused: Collection[int], *, leave: bool) -> None:
        """Make the averages the gradients, except those of parameters that no rank has used; or leave all as they are."""
        if not leave:
            self._buckets.put_back(results, unused)
        for bucket, _ in results:
            spec, reduced = self._buckets.storages[bucket].spec, partial(BucketReduced, bucket=bucket)
            self._events.record(RecordKind.BUCKET_REDUCED, self.step, spec=spec, event=reduced)
            self._buckets.release(bucket)

    def drop(self) -> None:
        self._pending.clear()
        self.held = None
        self.runner.drop_step()

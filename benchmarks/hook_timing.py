"""How long a hook computes, split at its collectives: what `hooks` measures.

Our hooks run on simulated ranks, of which the first is timed, and torch's on a group of one rank that does almost nothing; neither
includes the time of collectives. On CUDA, times are measured between events on the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective
from gradwire.collectives.op import sent_bytes
from gradwire.collectives.reference import perform
from gradwire.groups import Group, Work
from gradwire.hooks import BucketSpec, CommHook, GradBucket, Reduced, Turn
from gradwire.hooks.pump import advance, begin
from gradwire.interop import as_process_group

_WIDTH = 1024
Mark = Any
"""A point in time: seconds, or an event."""


@dataclass(frozen=True, slots=True)
class Split:
    """The seconds of one reduction: before the first collective, between, and after the last."""

    compress: float
    middle: float
    decompress: float

    @property
    def total(self) -> float:
        """The total computing time."""
        return self.compress + self.middle + self.decompress


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one reduction: bytes that a rank sends, and the relative error of the value."""

    wire_bytes: float
    error: float


class Stopwatch:
    """Points in time on the host, or on the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device

    def now(self) -> Mark:
        """The current time."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Synchronize the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def split(self, spans: Sequence[tuple[Mark, Mark]]) -> Split:
        """The first span, those in the middle, and the last; a single span is the first."""
        self.settle()
        seconds = [b.elapsed_time(a) * -1e-3 if self._cuda else b - a for a, b in spans]
        first, *rest = seconds
        return Split(first, sum(rest[:-1]), rest[-1] if rest else 0.0)


def bucket(nbytes: int, device: torch.device) -> BucketSpec:
    """A bucket of float32 matrices of 1024 columns, at most as many rows, and a vector if something is left."""
    left = nbytes // 4
    shapes: list[tuple[int, ...]] = []
    while left >= _WIDTH:
        rows = min(_WIDTH, left // _WIDTH)
        shapes.append((rows, _WIDTH))
        left -= rows * _WIDTH
    if left:
        shapes.append((left,))
    parameters = [(f"layer{i}.weight", torch.empty(shape, device="meta")) for i, shape in enumerate(shapes)]
    return BucketSpec.of(0, parameters, torch.empty(0, dtype=torch.float32, device=device))


def gradients(spec: BucketSpec, ranks: int) -> list[Tensor]:
    """Normal random numbers, with a different scale in each parameter, as gradients have."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(ranks):
        flat = torch.randn(spec.numel, generator=generator)
        for number, view in enumerate(spec.views(flat)):
            view.mul_(10.0 ** -(number % 3))
        made.append(flat.to(spec.device))
    return made


class Ours:
    """One of our hooks on simulated ranks. Each call is one reduction, and records its split."""

    def __init__(self, hook: CommHook, spec: BucketSpec, brought: Sequence[Tensor]) -> None:
        self.splits: list[Split] = []
        self.outcome: Outcome | None = None
        self._hook, self._spec, self._brought = hook, spec, brought
        self._states = [hook.init(spec) for _ in brought]
        self._watch = Stopwatch(spec.device)
        self._step = 0

    @torch.no_grad()
    def __call__(self) -> None:
        size, now = len(self._brought), self._watch.now
        turns = [Turn(self._spec, rank, size, self._step, donated=True) for rank in range(size)]
        reductions = [
            begin(self._hook, self._hook.reduce, g.clone(), state, turn, like=g)
            for g, state, turn in zip(self._brought, self._states, turns, strict=True)
        ]
        self._step += 1
        self._watch.settle()
        spans: list[tuple[Mark, Mark]] = []
        sent = 0.0
        while True:
            before = now()
            mine = advance(reductions[0])
            spans.append((before, now()))
            moves = [mine, *map(advance, reductions[1:])]
            ops = [move for move in moves if isinstance(move, Collective)]
            if not ops:
                break
            perform(ops)
            sent += max(sent_bytes(op, rank, size) for rank, op in enumerate(ops))
        self.splits.append(self._watch.split(spans))
        if self.outcome is None and isinstance(mine, Reduced):
            self.outcome = Outcome(sent, _error(mine.value, self._brought))


class Torchs:
    """One of torch's hooks on a group of one rank. The bytes are those of as many ranks as there are gradients.

    A hook that needs NCCL runs on the default process group instead: its parts cannot be told apart, NCCL's is a copy, and
    `nccl_bytes` is what a rank sends.
    """

    def __init__(
        self,
        register: Callable[[Any], tuple[Any, Callable[[Any, Any], Any]]],
        spec: BucketSpec,
        brought: Sequence[Tensor],
        *,
        lossy_after: int = 0,
        nccl_bytes: float | None = None,
    ) -> None:
        self.splits: list[Split] = []
        self.outcome: Outcome | None = None
        self._group = _Alone(Stopwatch(spec.device))
        self._process_group = as_process_group(self._group) if nccl_bytes is None else None
        self._state, self._hook = register(self._process_group)
        self._spec, self._mine, self._ranks = spec, brought[0], len(brought)
        self._parameters = [torch.empty(shape, device="meta") for shape in spec.shapes]
        self._lossy_after, self._nccl_bytes = lossy_after, nccl_bytes

    @torch.no_grad()
    def __call__(self) -> None:
        watch, group = self._group.watch, self._group
        buffer = self._mine.clone()
        group.submitted, group.spans = [], []
        watch.settle()
        before = watch.now()
        future = self._hook(self._state, GradBucket(self._spec, buffer, self._parameters, is_last=True))
        value = future.wait()
        end = watch.now()
        inner = [before, *(mark for span in group.spans for mark in span), end]
        self.splits.append(watch.split(list(zip(inner[::2], inner[1::2], strict=True))))
        if self.outcome is None and len(self.splits) > self._lossy_after:
            sent = sum(sent_bytes(op, 0, self._ranks) for op in group.submitted)
            self.outcome = Outcome(sent if self._nccl_bytes is None else self._nccl_bytes, _error(value, [self._mine]))

    def close(self) -> None:
        """Close the group."""
        self._group.close()


class _Alone(Group):
    """A group of one rank that records when its operations began and ended."""

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__(0, 1, name="alone")
        self.watch = watch
        self.submitted: list[Collective] = []
        self.spans: list[tuple[Mark, Mark]] = []

    def submit(self, op: Collective) -> Work:
        """Run it at once."""
        before = self.watch.now()
        work = self.begin(op)
        perform([op])
        work.finish()
        self.submitted.append(op)
        self.spans.append((before, self.watch.now()))
        return work


def _error(value: Tensor, brought: Sequence[Tensor]) -> float:
    truth = torch.stack([g.double() for g in brought]).mean(0)
    return float((value.double().flatten() - truth).norm() / truth.norm())

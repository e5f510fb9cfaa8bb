"""`overlap`: whether communication hooks overlap with backward, on the streams of a GPU.

One process, so nothing is sent, but hooks compute as usual. Kernels and their streams come from torch's profiler.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks import peers, plot
from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.workload import Workload
from gradwire.errors import UsageError
from gradwire.hooks import CommHook
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.parallel import DistributedDataParallel

_WARM_UP = 5


def run(args: argparse.Namespace, console: Console) -> Result:
    """Profile a step with each hook."""
    plot.check_plot("--plot", args.plot)
    if not torch.cuda.is_available():
        raise UsageError(
            "overlap: torch sees no CUDA device. On the CPU, the benchmark training shows how much communication a step waits for."
        )
    device = torch.device("cuda", 0)
    machine = describe(device)
    with peers.world_of_one(device), console.status("preparing"):
        work = Workload.gpt2(args.size, batch=args.batch, device=device)
        timelines = [_profile(name, NAMED_HOOKS[name].build(), work) for name in args.hooks]
    if args.plot is not None:
        draw(args.plot, timelines, machine)
    return Result("overlap", machine, {"model": work.words}, [figures_of(timelines)])


def _profile(name: str, hook: CommHook, work: Workload) -> Timeline:
    model: nn.Module = DistributedDataParallel(copy.deepcopy(work.model), gradient_as_bucket_view=True)
    try:
        model.set_hook(hook)  # type: ignore[operator]
        step = work.step(model, adamw=False)
        for _ in range(_WARM_UP):
            step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        return Timeline.of(name, kernels_of(profile))
    finally:
        peers.unwrap(model)


def figures_of(timelines: Sequence[Timeline]) -> Figures:
    """One row per hook."""
    rows = {
        one.name: {
            "step": one.seconds,
            "hook": one.busy,
            "overlapped": one.hidden,
            "share": one.hidden / one.busy if one.busy else None,
            "model_intervals": one.model,
            "hook_intervals": one.hook,
        }
        for one in timelines
    }
    columns = (
        Column("step", "step\nms", fixed(2, 1e3)),
        Column("hook", "hook's kernels\nms", fixed(3, 1e3)),
        Column("overlapped", "overlapped\nms", fixed(3, 1e3)),
        Column("share", "share", "{:.0%}".format),
    )
    caption = "The hook's kernels are all kernels that did not run on the model's stream."
    return Figures(rows, columns, caption, first="hook")


def draw(file: Path, timelines: Sequence[Timeline], machine: Mapping[str, str]) -> None:
    """A pair of bars for each: the model's stream above, the hook's below."""
    bars = []
    for one in timelines:
        note = f"{one.busy * 1e3:.2f} ms, {one.hidden / one.busy:.0%} overlapped" if one.busy else "no separate kernels"
        bars.append(plot.Bar(f"{one.name}: model", [(b * 1e3, e * 1e3, "model") for b, e in one.model]))
        bars.append(plot.Bar("hook", [(b * 1e3, e * 1e3, "hook") for b, e in one.hook], note))
    footer = f"{machine.get('gpu', machine['cpu'])}; {machine['software']}"
    plot.draw(file, [plot.Panel("", "ms of one step", bars=bars)], title="", footer=footer)


# -- intervals -------------------------------------------------------------------------------------------------------------------

Interval = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work on a stream."""

    name: str
    stream: int
    begin: float
    end: float


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals, in order.

    >>> union([(3, 4), (0, 1), (0.5, 2)])
    [(0, 2), (3, 4)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The length of their union.

    >>> length([(0, 1), (0.5, 2)])
    2
    """
    return sum(end - begin for begin, end in union(intervals))


def common(one: Iterable[Interval], other: Iterable[Interval]) -> float:
    """The length of their intersection.

    >>> common([(0, 2), (3, 5)], [(1, 4)])
    2
    """
    a, b = list(one), list(other)
    return length(a) + length(b) - length(a + b)


def kernels_of(profile: Any) -> list[Kernel]:
    """What a finished torch.profiler.profile recorded on the device, from the start of the first kernel on."""
    events = [e for e in profile.profiler.kineto_results.events() if str(e.device_type()).endswith("CUDA")]
    # Spans over kernels, such as user annotations, are in the device's list too, but are not kernels.
    events = [e for e in events if e.duration_ns() > 0 and not e.is_user_annotation()]
    start = min((e.start_ns() for e in events), default=0)
    return [
        Kernel(
            e.name(),
            e.device_resource_id(),
            (e.start_ns() - start) * 1e-9,
            (e.start_ns() - start + e.duration_ns()) * 1e-9,
        )
        for e in events
    ]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step: what ran on the model's stream, and what on others."""

    name: str
    model: tuple[Interval, ...]
    hook: tuple[Interval, ...]

    @classmethod
    def of(cls, name: str, kernels: Sequence[Kernel]) -> Timeline:
        """The stream that is busy longest is taken as the model's."""
        streams: dict[int, list[Interval]] = {}
        for kernel in kernels:
            streams.setdefault(kernel.stream, []).append((kernel.begin, kernel.end))
        main = max(streams, key=lambda stream: length(streams[stream]), default=None)
        rest = [interval for stream, intervals in streams.items() if stream != main for interval in intervals]
        return cls(name, tuple(union(streams.get(main, []) if main is not None else [])), tuple(union(rest)))

    @property
    def busy(self) -> float:
        """Seconds in which the hook's kernels ran."""
        return length(self.hook)

    @property
    def hidden(self) -> float:
        """Seconds of these that overlapped with the model's kernels."""
        return common(self.hook, self.model)

    @property
    def seconds(self) -> float:
        """From the start of the first kernel to the end of the last."""
        return max((end for _, end in self.model + self.hook), default=0.0)

"""What ran on a GPU, stream by stream: intervals, the overlap of two streams, and a plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.cli.experiment.plot_file import new_figure

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


def draw(file: Path, timelines: Sequence[Timeline], machine: Mapping[str, str]) -> None:
    """A pair of rows for each: the model's stream above, the hook's below."""
    figure = new_figure(11, 1.1 + 0.85 * len(timelines))
    axes = figure.subplots()
    places, labels = [], []
    for number, timeline in enumerate(timelines):
        top = -2.6 * number
        for place, what, intervals, color in (
            (top, "model", timeline.model, "#56b4e9"),
            (top - 1, "hook", timeline.hook, "#d55e00"),
        ):
            axes.broken_barh([(b * 1e3, (e - b) * 1e3) for b, e in intervals], (place - 0.42, 0.84), color=color, lw=0)
            places.append(place)
            labels.append(f"{timeline.name}: {what}" if what == "model" else what)
        axes.annotate(
            f"{timeline.busy * 1e3:.2f} ms, {timeline.hidden / timeline.busy:.0%} overlapped"
            if timeline.busy
            else "no separate kernels",
            (timeline.seconds * 1e3, top - 1),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#d55e00",
        )
    axes.set_yticks(places, labels, fontsize=8.5)
    axes.set_xlim(0, max(t.seconds for t in timelines) * 1e3 * 1.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(f"ms of one step\n{machine.get('gpu', machine['cpu'])}; {machine['software']}", fontsize=9)
    figure.savefig(file)

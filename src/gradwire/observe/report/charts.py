"""The charts of a report as shapes with coordinates, which the page draws as SVG. Pure.

A chart of many steps has fewer points than steps. A bin keeps the least, the middle and the most, so that no outlier is hidden.

Colors are classes of the page's style sheet, so that they follow light and dark.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from gradwire.observe.report.report_model import StepRow, Timeline
from gradwire.observe.rings.intervals import Operation, free_lane
from gradwire.observe.stragglers.steps import Phase
from gradwire.observe.units import duration, plural, size

WIDTH = 1000
_LEFT, _RIGHT = 64, 12
_LEVELS = 8
_LANE = 14


class Rect(NamedTuple):
    """A rectangle; `title` is shown when the pointer is on it."""

    x: float
    y: float
    width: float
    height: float
    style: str
    title: str = ""


class Label(NamedTuple):
    """A text that begins, ends or is centered at x."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    style: str = "label"


class Path(NamedTuple):
    """Lines or areas, in SVG's notation."""

    d: str
    style: str


@dataclass(slots=True)
class Chart:
    """A picture: its shapes in the order in which they are drawn."""

    title: str
    height: float = 0
    rects: list[Rect] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    texts: list[Label] = field(default_factory=list)
    width: float = WIDTH


_T = TypeVar("_T")


def _parts(rows: Sequence[_T], most: int) -> tuple[list[Sequence[_T]], int]:
    """At most `most` parts of `rows`, and the length of each."""
    length = math.ceil(len(rows) / most)
    return [rows[start : start + length] for start in range(0, len(rows), length)], length


def bin_steps(rows: Sequence[StepRow], most: int) -> tuple[list[StepRow], int]:
    """At most `most` rows, and how many steps each stands for.

    >>> bin_steps([StepRow(0, 1.0, 2.0, 3.0), StepRow(1, 1.0, 4.0, 9.0), StepRow(2, 1.0, 1.0, 1.0)], 2)
    ([StepRow(step=0, low=1.0, middle=3.0, high=9.0), StepRow(step=2, low=1.0, middle=1.0, high=1.0)], 2)
    """
    parts, per_bin = _parts(rows, most)
    lows, highs = [min(row.low for row in part) for part in parts], [max(row.high for row in part) for part in parts]
    middles = [median(row.middle for row in part) for part in parts]
    return [StepRow(part[0].step, *bounds) for part, *bounds in zip(parts, lows, middles, highs, strict=True)], per_bin


def history(rows: Sequence[StepRow]) -> tuple[Chart, int]:
    """The step time over the run: the median of the ranks, and a band from the fastest to the slowest. And the steps per point."""
    top, height, bottom = 10, 180, 26
    found, per_bin = bin_steps(rows, 240)
    chart = Chart("Step time over the run", top + height + bottom)
    most = max(row.high for row in found)
    # One step that took far longer than the others must not flatten the rest.
    usual = sorted(row.high for row in found)[int(0.98 * (len(found) - 1))]
    limit = min(most, 2.5 * usual) * 1.05 or 1.0
    first, last = found[0].step, found[-1].step

    x = functools.partial(_step_x, first, last)

    def y(seconds: float) -> float:
        return top + height * (1 - min(seconds, limit) / limit)

    for value in ticks(limit):
        chart.paths.append(Path(f"M{_LEFT} {y(value):.1f}H{WIDTH - _RIGHT}", "grid"))
        chart.texts.append(Label(_LEFT - 8, y(value) + 4, duration(value), "end"))
    band = [f"{x(row.step):.1f} {y(row.high):.1f}" for row in found]
    band += [f"{x(row.step):.1f} {y(row.low):.1f}" for row in reversed(found)]
    chart.paths.append(Path("M" + "L".join(band) + "Z", "band"))
    chart.paths.append(Path("M" + "L".join(f"{x(row.step):.1f} {y(row.middle):.1f}" for row in found), "line"))
    labeled = -1000.0
    for row in found:
        if row.high > limit and x(row.step) - labeled >= 90:  # else a label would be drawn over another
            labeled = x(row.step)
            place, anchor = (labeled - 7, "end") if labeled > WIDTH / 2 else (labeled + 7, "start")
            chart.texts.append(Label(place, top + 4, duration(row.high), anchor, "over"))
    _step_axis(chart, first, last, top + height + 18)
    return chart, per_bin


def phases(means: Mapping[int, Mapping[Phase, float]]) -> Chart:
    """Where a step's time goes: a bar for each rank."""
    row, gap = 16, 6
    chart = Chart("Time per step by phase and rank", len(means) * (row + gap) + 28)
    longest = max((sum(one.values()) for one in means.values()), default=0) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT - 70) / longest
    for number, (rank, one) in enumerate(means.items()):
        x, y = float(_LEFT), number * (row + gap) + 4
        chart.texts.append(Label(_LEFT - 8, y + 12, f"rank {rank}", "end"))
        for phase in Phase:
            width = one.get(phase, 0.0) * scale
            title = f"rank {rank}: {phase.value} {duration(one.get(phase, 0.0))}"
            chart.rects.append(Rect(x, y, width, row, phase_style(phase), title))
            x += width
        chart.texts.append(Label(x + 6, y + 12, duration(sum(one.values()))))
    _time_axis(chart, longest, scale, chart.height - 6)
    return chart


def timeline(line: Timeline) -> Chart:
    """One step: for each rank its phases, and below them its buckets with their collectives, on as many lanes as they need."""
    chart = Chart(f"{line.title} on {plural(len(line.rows), 'rank')}")
    scale = (WIDTH - _LEFT - _RIGHT) / max(line.end - line.start, 1)

    def draw(start: int, end: int | None, y: float, height: float, style: str, title: str) -> float:
        """What is not over lasts to the end of the chart."""
        stop = line.end if end is None else end
        x, width = _LEFT + (start - line.start) * scale, max(1.0, (stop - start) * scale)
        chart.rects.append(Rect(x, y, width, height, style, f"{title}, {duration((stop - start) / 1e9)}"))
        return x

    def draw_operation(one: Operation, y: float, style: str) -> None:
        title = f"{one.record.op} {one.record.label}, {size(one.record.nbytes)}"
        draw(one.submitted, one.ended, y, 4.5, style, title)

    y = 4.0
    for row in line.rows:
        chart.texts.append(Label(_LEFT - 8, y + 13, f"rank {row.rank}", "end"))
        for span in row.phases:
            draw(span.start, span.end, y, 18, phase_style(span.phase), f"rank {row.rank}: {span.phase.value}")
        y += 21
        lanes: list[int] = []
        for bucket in row.buckets:
            full = bucket.record
            top = y + free_lane(lanes, full.time, line.end if bucket.reduced is None else bucket.reduced) * _LANE
            title = f"rank {row.rank}: bucket {full.bucket}, {size(full.nbytes)}, {bucket.hook or 'not launched'}"
            x = draw(full.time, bucket.reduced, top, 12, "bucket", title)
            chart.texts.append(Label(x - 4, top + 10, str(full.bucket), "end", "tiny"))
            for one in row.operations:
                if one.record.bucket == full.bucket and one.record.step == full.step:
                    draw_operation(one, top + 7.5, "wire")
        for one in row.operations:
            if one.record.bucket < 0:
                lane = free_lane(lanes, one.submitted, line.end if one.ended is None else one.ended)
                draw_operation(one, y + lane * _LANE + 3, "other")
        y += _LANE * len(lanes) + 12
    chart.height = y + 22
    _time_axis(chart, (line.end - line.start) / 1e9, scale * 1e9, chart.height - 6)
    return chart


def heat_map(lateness: Mapping[int, Mapping[int, float]]) -> tuple[Chart, int, list[float]]:
    """Rank × step: how long after the first rank each was ready. And the steps per cell, and the limits of the levels."""
    steps = sorted(next(iter(lateness.values())))
    parts, per_bin = _parts(steps, 120)
    table = {rank: [fmean(row[step] for step in part) for part in parts] for rank, row in lateness.items()}
    row = 16.0 if len(table) <= 24 else 9.0
    chart = Chart("Time after the first rank at which each rank was ready", len(table) * row + 26)
    values = sorted(value for cells in table.values() for value in cells)
    top = values[int(0.98 * (len(values) - 1))] or max(values) or 1e-9
    limits = [top * (level + 1) / _LEVELS for level in range(_LEVELS - 1)]
    width = (WIDTH - _LEFT - _RIGHT) / len(parts)
    drawn: dict[int, list[str]] = {}
    for number, (rank, cells) in enumerate(table.items()):
        x, y = float(_LEFT), 2 + number * row
        for level, equal in itertools.groupby(bisect_right(limits, value) for value in cells):  # are one rectangle
            wide = len(list(equal)) * width
            drawn.setdefault(level, []).append(f"M{x:.1f} {y:.0f}h{wide:.1f}v{row - 1:.0f}h-{wide:.1f}z")
            x += wide
        if len(table) <= 24 or number % 4 == 0:
            chart.texts.append(Label(_LEFT - 8, y + min(row, 14) - 2, f"rank {rank}", "end"))
    chart.paths += [Path("".join(parts), f"heat{level}") for level, parts in sorted(drawn.items())]
    _step_axis(chart, steps[0], steps[-1], chart.height - 6)
    return chart, per_bin, limits


def phase_style(phase: Phase) -> str:
    """The class of a phase in the style sheet.

    >>> phase_style(Phase.EXPOSED)
    'p-exposed'
    """
    return f"p-{phase.name.lower()}"


def ticks(limit: float, count: int = 4) -> list[float]:
    """Round values from 0 to at most `limit`.

    >>> ticks(0.094)
    [0.0, 0.025, 0.05, 0.075]
    """
    if not limit > 0:
        return [0.0]
    rough = limit / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [round(i * step, 12) for i in range(int(limit / step + 1e-9) + 1)]


def _time_axis(chart: Chart, seconds: float, scale: float, y: float) -> None:
    for value in ticks(seconds, 8):
        x = _LEFT + value * scale
        chart.paths.append(Path(f"M{x:.1f} 0V{y - 14:.1f}", "grid"))
        chart.texts.append(Label(x, y, duration(value) if value else "0", _anchor(x)))


def _step_x(first: int, last: int, step: float) -> float:
    return _LEFT + (step - first) / max(1, last - first) * (WIDTH - _LEFT - _RIGHT)


def _step_axis(chart: Chart, first: int, last: int, y: float) -> None:
    step = max(1, round(ticks(max(1, last - first), 8)[1]))
    for number in range(-(-first // step) * step, last + 1, step):
        x = _step_x(first, last, number)
        chart.texts.append(Label(x, y, str(number), _anchor(x)))
    chart.texts.append(Label(_LEFT - 8, y, "step", "end"))


def _anchor(x: float) -> str:
    return "end" if x > WIDTH - 60 else "start" if x < _LEFT + 20 else "middle"

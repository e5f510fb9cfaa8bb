"""The plot of `gradwire bench collectives`: time against bytes, one line per contender, one panel per number of ranks.

matplotlib is imported only here, and only if a plot is requested.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gradwire.cli.bench.contenders import GLOO, HEAP, MEMCPY, MPI, ORDINARY
from gradwire.cli.bench.sweep import Sweep, size_words, time_words
from gradwire.cli.experiment.plot_file import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colors that are distinct for any kind of color vision; markers repeat the distinction.
_STYLES = {
    HEAP: ("#0072b2", "o", "-"),
    ORDINARY: ("#56b4e9", "s", "-"),
    GLOO: ("#d55e00", "^", "-"),
    MPI: ("#009e73", "D", "-"),
    MEMCPY: ("#777777", "", "--"),
}
_APART = 0.055
"""The minimum distance of two labels, as a fraction of the panel's height."""


def draw(file: Path, op: str, sweeps: Sequence[Sweep], machine: Mapping[str, str]) -> None:
    """Draw all times into `file`: medians, with a band between the quartiles."""
    figure = new_figure(6.2 * len(sweeps) + 0.6, 5.4)
    panels: list[Axes] = list(figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0])
    for sweep, axes in zip(sweeps, panels, strict=True):
        for name in sweep.names:
            _line(axes, sweep, name)
    _time_scale(panels[0], sweeps)
    for sweep, axes in zip(sweeps, panels, strict=True):
        axes.set_title(f"{sweep.ranks} ranks", fontsize=11)
        _byte_scale(axes, sweep.sizes)
        axes.grid(True, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        _label_ends(axes, sweep)
    panels[0].set_ylabel("time of a call (median, quartiles)")
    figure.suptitle(f"{op}, float32, one thread per rank", fontsize=13)
    figure.supxlabel(f"bytes on each rank\n{machine['cpu']}; {machine['software']}", fontsize=9)
    figure.savefig(file)


def _line(axes: Axes, sweep: Sweep, name: str) -> None:
    color, marker, line = _STYLES[name]
    series = [sweep.series[name, nbytes] for nbytes in sweep.sizes]
    low, high = zip(*(s.quartiles for s in series), strict=True)
    axes.fill_between(sweep.sizes, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(sweep.sizes, [s.median for s in series], color=color, marker=marker, markersize=4.5, linestyle=line)


def _byte_scale(axes: Axes, sizes: Sequence[int]) -> None:
    """Mark every size; the space on the right is for the lines' names."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_words(size) for size in sizes], rotation=40, ha="right", fontsize=8)
    axes.minorticks_off()
    span = math.log2(sizes[-1] / sizes[0]) or 1.0
    axes.set_xlim(sizes[0] / 2 ** (0.04 * span), sizes[-1] * 2 ** (0.40 * span))


def _time_scale(axes: Axes, sweeps: Sequence[Sweep]) -> None:
    """Powers of ten, with units."""
    axes.set_yscale("log")
    times = [series.median for sweep in sweeps for series in sweep.series.values()]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    ticks = [10.0**power for power in range(low, max(high, low + 1) + 1)]
    axes.set_yticks(ticks, [_power_words(tick) for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])


def _power_words(seconds: float) -> str:
    number, unit = time_words(seconds * 1.0001).split()
    return f"{float(number):g} {unit}"


def _label_ends(axes: Axes, sweep: Sweep) -> None:
    """Write each line's name, and its time at the largest size, next to its end; separate names that would overlap."""
    bottom, top = (math.log10(y) for y in axes.get_ylim())
    largest = sweep.sizes[-1]
    ends = {name: (math.log10(sweep.series[name, largest].median) - bottom) / (top - bottom) for name in sweep.names}
    for (name, place), end in zip(_apart(ends).items(), sorted(ends.values()), strict=True):
        color = _STYLES[name][0]
        axes.annotate(
            f"{name}  {time_words(sweep.series[name, largest].median)}",
            xy=(largest, 10 ** (bottom + end * (top - bottom))),
            xytext=(0.77, place),
            textcoords="axes fraction",
            va="center",
            fontsize=8.5,
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def _apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Positions for labels that belong at `ends`, from the lowest to the highest, at least `_APART` from each other.

    >>> _apart({"b": 0.5, "a": 0.5, "c": 0.1})
    {'c': 0.1, 'b': 0.4725, 'a': 0.5275}
    """
    names = sorted(ends, key=lambda name: ends[name])
    places = [ends[name] for name in names]
    for _ in range(100):  # push neighbors apart, half each, until none is too near
        for i in range(1, len(places)):
            lack = _APART - (places[i] - places[i - 1])
            if lack > 1e-9:
                places[i - 1] -= lack / 2
                places[i] += lack / 2
    return {name: round(place, 6) for name, place in zip(names, places, strict=True)}

"""Plots of benchmarks: panels of lines, or of bars in parts. matplotlib is imported only if something is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
# Colors that are distinct for any kind of color vision; markers repeat the distinction. What we compare with is dashed and gray.
COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7f3c8d",
    "#8c6d31",
    "#f0506e",
    "#11a579",
)
_GRAYS = ("#000000", "#777777", "#aaaaaa")
_MARKERS = "osD^vP*Xhp<>"


@dataclass(frozen=True, slots=True)
class Line:
    """A line, perhaps with a band around it, and a point that is marked."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None
    marked: tuple[float, float] | None = None
    is_reference: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in parts: (begin, end, kind), and text at its end."""

    name: str
    parts: Sequence[tuple[float, float, str]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes, with either lines or bars."""

    title: str
    x_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[Bar] = ()
    x_ticks: Mapping[float, str] | None = None
    level: float | None = None
    """The height of a dotted line."""


def check_plot(option: str, file: Path | None) -> None:
    """Raise if `file`, the value of `option`, cannot be drawn: before minutes are spent on measuring."""
    if file is None:
        return
    if file.suffix.lower() not in KINDS:
        raise UsageError(f"{option} {file}: unsupported file type. Use a name that ends in {', '.join(KINDS)}.")
    if not file.parent.is_dir():
        raise UsageError(f"{option} {file}: there is no folder {file.parent}. Create it first.")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} {file}: matplotlib is not installed. pip install gradwire[plot], or omit {option}.")


def draw(
    file: Path,
    panels: Sequence[Panel],
    *,
    title: str,
    footer: str,
    y_label: str = "",
    log: str = "",
    y_show: Callable[[float], str] | None = None,
) -> None:
    """Draw `panels` side by side. `log` names the axes with a logarithmic scale: "x", "y" or "xy"."""
    rows = max((len(panel.bars) for panel in panels), default=0)
    figure = new_figure(6.2 * len(panels) + 0.8, 1.9 + 0.34 * rows if rows else 5.4)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], strict=True):
        _lines(axes, panel.lines)
        if panel.bars:
            _bars(axes, panel.bars)
        axes.set_title(panel.title, fontsize=11)
        axes.set_xlabel(panel.x_label)
        for scale in log:
            getattr(axes, f"set_{scale}scale")("log")
        if panel.level is not None:
            axes.axhline(panel.level, color="#000000", linewidth=0.8, linestyle=":")
        if panel.x_ticks is not None:
            axes.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()), rotation=40, ha="right", fontsize=8)
            axes.minorticks_off()
        elif "x" in log:
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        if y_show is not None:
            axes.yaxis.set_major_formatter(lambda value, _: y_show(value))
        axes.grid(True, color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    axes = figure.axes[0]
    axes.set_ylabel(y_label)
    if rows:
        axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(footer, fontsize=8)
    figure.savefig(file)


def new_figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _lines(axes: Any, lines: Sequence[Line]) -> None:
    ours, references = iter(COLORS * 2), iter(_GRAYS * 4)
    for number, line in enumerate(lines):
        style: dict[str, Any] = {"color": next(ours), "linestyle": "-"}
        if line.is_reference:
            style = {"color": next(references), "linestyle": "--"}
        marker = _MARKERS[number % len(_MARKERS)]
        axes.plot(line.x, line.y, label=line.name, marker=marker, markersize=3.5, linewidth=1.3, **style)
        if line.band is not None:
            axes.fill_between(line.x, *line.band, color=style["color"], alpha=0.15, linewidth=0)
        if line.marked is not None:
            x, y = line.marked
            axes.plot([x], [y], marker=marker, markersize=9, color=style["color"])


def _bars(axes: Any, bars: Sequence[Bar]) -> None:
    kinds = list(dict.fromkeys(kind for bar in bars for _, _, kind in bar.parts))
    ends = [max((end for _, end, _ in bar.parts), default=0.0) for bar in bars]
    for row, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        for number, kind in enumerate(kinds):
            spans = [(begin, until - begin) for begin, until, of in bar.parts if of == kind]
            axes.broken_barh(spans, (row - 0.38, 0.76), color=COLORS[number], lw=0, label=None if row else kind)
        axes.annotate(f" {bar.note}", (end, row), va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars], fontsize=8.5)
    axes.set_xlim(0, max(ends) * 1.45)

"""The charts of `gradwire lab slowlink`, loss against seconds and against bytes, and an HTML page with them.

matplotlib is imported only here, and only if something is drawn.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.cli.experiment.plot_file import new_figure
from gradwire.cli.lab.contenders import CONTENDERS
from gradwire.cli.lab.curve import Curve, Point
from gradwire.cli.lab.figures import HEADS, Race, cells, lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colors that are distinct for any kind of color vision; markers repeat the distinction. torch's lines are dashed.
_COLORS = (
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
    "#444444",
)
_TORCH_COLORS = ("#000000", "#777777", "#aaaaaa")
_MARKERS = "osD^vP*Xhp<>"


def draw(file: Path, race: Race, facts: Mapping[str, str]) -> None:
    """Draw both charts into `file`."""
    figure = _figure(race, facts)
    figure.savefig(file)


def _figure(race: Race, facts: Mapping[str, str]) -> Figure:
    figure = new_figure(13, 5.6)
    left, right = figure.subplots(1, 2, sharey=True)
    for number, curve in enumerate(race.curves):
        style = _style(race, number)
        _line(left, race, curve, style, lambda p: p.seconds)
        _line(right, race, curve, style, lambda p: p.nbytes / 1e6)
    for axes, words in ((left, "seconds of training"), (right, "MB that a rank has sent")):
        axes.set_xscale("log")
        axes.set_xlabel(words)
        axes.axhline(race.mark, color="#000000", linewidth=0.8, linestyle=":")
        axes.grid(True, color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    left.set_ylabel("loss on held-out text (nats per character)")
    left.annotate(
        f"target: {race.mark:.3f}",
        xy=(0.01, race.mark),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        va="top",
        fontsize=8.5,
    )
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", fontsize=9, frameon=False)
    figure.suptitle(
        f"Reaching torch DDP's loss over {race.mbit:g} Mbit/s; a large marker where it was reached", fontsize=12
    )
    figure.supxlabel(f"{facts['model']}\n{facts['link']}\n{facts['cpu']}; {facts['software']}", fontsize=8)
    return figure


def _style(race: Race, number: int) -> dict[str, Any]:
    name = race.curves[number].name
    torchs = [c.name for c in race.curves if c.name.startswith("torch")]
    if name in torchs:
        return {
            "color": _TORCH_COLORS[torchs.index(name)],
            "linestyle": "--",
            "marker": _MARKERS[number % len(_MARKERS)],
        }
    place = [c.name for c in race.curves if c.name not in torchs].index(name)
    return {"color": _COLORS[place % len(_COLORS)], "marker": _MARKERS[number % len(_MARKERS)]}


def _line(axes: Axes, race: Race, curve: Curve, style: dict[str, Any], place: Any) -> None:
    points: list[Point] = [p for p in curve.points if p.steps and p.whole]
    ratio = race.ratio(curve)
    label = curve.name if ratio is None or curve is race.reference else f"{curve.name}  {ratio:.1f}x"
    axes.plot([place(p) for p in points], [p.loss for p in points], label=label, markersize=3.5, linewidth=1.3, **style)
    reached = race.reached(curve)
    if reached is not None:
        axes.plot([place(reached)], [reached.loss], markersize=9, **(style | {"linestyle": ""}))


def write_page(file: Path, race: Race, facts: Mapping[str, str]) -> None:
    """Write a self-contained page."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        _figure(race, facts).savefig(buffer, format="svg")
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    heads = "".join(f"<th>{html.escape(head)}</th>" for head in (*HEADS, "description"))
    rows = "\n".join(
        f"<tr{' class=best' if curve is race.best else ''}>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in (*cells(race, curve), CONTENDERS[curve.name].words))
        + "</tr>"
        for curve in race.curves
    )
    said = "\n".join(f"<p>{html.escape(line)}</p>" for line in lines(race))
    listed = "\n".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in facts.items())
    file.write_text(
        _PAGE.format(
            mbit=f"{race.mbit:g}", mark=f"{race.mark:.3f}", heads=heads, rows=rows, said=said, facts=listed, svg=svg
        )
    )


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gradwire lab slowlink, {mbit} Mbit/s</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222; }}
h1 {{ font-size: 1.4em; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.25em 0.8em; text-align: right; border-bottom: 1px solid #ddd; }}
th:first-child, td:first-child, th:last-child, td:last-child {{ text-align: left; }}
tr.best td {{ font-weight: 600; background: #eef6fb; }}
dl {{ display: grid; grid-template-columns: max-content auto; gap: 0.1em 1.2em; color: #555; font-size: 0.9em; }}
dd {{ margin: 0; }}
svg {{ width: 100%; height: auto; margin-top: 1.5em; }}
</style>
</head>
<body>
<h1>Training over {mbit} Mbit/s: time to torch DDP's loss of {mark}</h1>
{said}
<table>
<thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
{svg}
<dl>
{facts}
</dl>
</body>
</html>
"""

"""The plot of `gradwire bench hooks`: for each size one bar per hook, in three parts, with the bytes it sends next to it.

matplotlib is imported only here, and only if a plot is requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.cli.bench.hooks_figures import Measured
from gradwire.cli.bench.sweep import size_words, time_words
from gradwire.cli.experiment.plot_file import new_figure

_COLORS = {"compress": "#0072b2", "middle": "#e69f00", "decompress": "#009e73"}


def draw(file: Path, measured: Sequence[Measured], facts: Mapping[str, str]) -> None:
    """Draw medians into `file`."""
    names = list(measured[0].hooks)
    height = 1.9 + 0.34 * len(names)
    figure = new_figure(6.0 * len(measured) + 1.0, height)
    panels = figure.subplots(1, len(measured), squeeze=False, sharey=True)[0]
    for one, axes in zip(measured, panels, strict=True):
        longest = max(figures.total.median for figures in one.hooks.values())
        for row, figures in enumerate(one.hooks.values()):
            begin = 0.0
            for part, color in _COLORS.items():
                seconds = figures.parts[part].median
                axes.barh(
                    row, seconds * 1e3, left=begin * 1e3, color=color, height=0.7, label=part if row == 0 else None
                )
                begin += seconds
            share = figures.outcome.wire_bytes / one.hooks[names[0]].outcome.wire_bytes if names[0] == "mean" else None
            words = f" {time_words(figures.total.median)}" + ("" if share is None else f", sends {share * 100:.3g} %")
            axes.annotate(words, (begin * 1e3, row), va="center", fontsize=8)
        axes.set_xlim(0, longest * 1e3 * 1.45)
        axes.set_yticks(range(len(names)), names)
        axes.set_title(f"a bucket of {size_words(one.nbytes)}", fontsize=11)
        axes.set_xlabel("ms of computing (medians)")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="x", color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, fontsize=9, frameon=False)
    figure.supxlabel(f"{facts.get('gpu', facts['cpu'])}; {facts['software']}", fontsize=8)
    figure.savefig(file)

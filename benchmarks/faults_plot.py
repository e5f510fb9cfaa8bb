"""The picture of `faults`: committed steps, members and faults over time."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plot import COLORS, new_figure

_BIN, _STEPS = 0.25, 4
"""The least number of seconds, and of usual steps, for which members are counted together."""
_MANY = 100
"""Of more faults the marks are smaller."""


@dataclass(frozen=True, slots=True)
class History:
    """What a run did in a window of so many `seconds`; all times are since its begin."""

    name: str
    seconds: float
    commits: Sequence[tuple[float, int, int]]
    """When, which step, and how many members it had."""
    faults: Sequence[float]

    @property
    def progress(self) -> list[tuple[float, int]]:
        """When how many steps had been committed; a step that is committed again after others is none."""
        found, before, highest = [(0.0, 0)], None, -1
        for at, step, _ in sorted(self.commits):
            before = step if before is None else before
            if step > highest:
                highest = step
                found.append((at, step - before + 1))
        return found

    @property
    def members(self) -> list[tuple[float, int]]:
        """With how many members steps were committed in each part of the window, of some steps at least; 0 if none was."""
        times = [at for at, _ in self.progress]
        between = statistics.median([later - at for at, later in itertools.pairwise(times)] or [0.0])
        most = [0] * max(1, round(self.seconds / max(_BIN, _STEPS * between)))
        length = self.seconds / len(most)
        for at, _, members in self.commits:
            index = min(int(at / length), len(most) - 1)
            most[index] = max(most[index], members)
        return [(index * length, members) for index, members in enumerate(most)]


def draw(file: Path, runs: Sequence[History], *, title: str, footer: str, pace: float | None = None) -> None:
    """Draw all runs. `pace` is how many steps per second were committed without faults."""
    figure = new_figure(10.0, 4.2 + 1.05 * len(runs))
    axes = figure.subplots(1 + len(runs), 1, sharex=True, height_ratios=[3.6, *[1.0] * len(runs)], squeeze=False)[:, 0]
    longest = max(run.seconds for run in runs)
    if pace is not None:
        axes[0].plot([0, longest], [0, pace * longest], color="#777777", linestyle="--", label="without faults")
    for run, below, color in zip(runs, axes[1:], COLORS, strict=False):
        times, steps = zip(*run.progress, (run.seconds, run.progress[-1][1]), strict=True)
        axes[0].plot(times, steps, color=color, linewidth=1.4, label=run.name, drawstyle="steps-post")
        marks = [steps[bisect.bisect(times, fault) - 1] for fault in run.faults]
        axes[0].plot(run.faults, marks, color=color, linestyle="", **_mark(run))
        _strip(below, run, color)
    axes[0].plot([], [], color="#000000", marker="x", linestyle="", label="a rank is killed")
    axes[0].set_ylabel("steps committed")
    axes[0].legend(loc="upper left", fontsize=9, frameon=False)
    axes[0].set_ylim(bottom=0)
    axes[0].set_xlim(0, longest)
    axes[-1].set_xlabel("seconds")
    for one in axes:
        one.grid(True, color="#e4e4e4", linewidth=0.6)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(footer, fontsize=8)
    figure.savefig(file)


def measured_on(machine: Mapping[str, str]) -> str:
    """Where it was measured."""
    return "; ".join(str(value) for value in list(machine.values())[:3])


def _mark(run: History) -> dict[str, Any]:
    many = len(run.faults) > _MANY
    return {"marker": "x", "markersize": 3 if many else 6, "markeredgewidth": 0.5 if many else 1.6}


def _strip(axes: Any, run: History, color: str) -> None:
    times, members = zip(*run.members, strict=True)
    most = max(1, *members)
    axes.fill_between([*times, run.seconds], [*members, members[-1]], step="post", color=color, alpha=0.35, linewidth=0)
    axes.plot(run.faults, [most + 0.5] * len(run.faults), color=color, linestyle="", **_mark(run))
    axes.set_ylim(0, most + 1)
    axes.set_yticks([0, most])
    axes.set_ylabel("members", fontsize=8)
    axes.set_title(run.name, loc="left", fontsize=9, pad=2)

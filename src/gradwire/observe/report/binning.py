"""Fewer points than steps, without hiding outliers: a bin keeps the least, the middle and the most of what is in it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from gradwire.observe.report.report_model import StepRow


def bin_steps(rows: Sequence[StepRow], most: int) -> tuple[list[StepRow], int]:
    """At most `most` rows, and how many steps each stands for.

    >>> bin_steps([StepRow(0, 1.0, 2.0, 3.0), StepRow(1, 1.0, 4.0, 9.0), StepRow(2, 1.0, 1.0, 1.0)], 2)
    ([StepRow(step=0, low=1.0, middle=3.0, high=9.0), StepRow(step=2, low=1.0, middle=1.0, high=1.0)], 2)
    """
    per_bin = math.ceil(len(rows) / most)
    found = []
    for start in range(0, len(rows), per_bin):
        part = rows[start : start + per_bin]
        found.append(
            StepRow(
                part[0].step,
                min(row.low for row in part),
                median(row.middle for row in part),
                max(row.high for row in part),
            )
        )
    return found, per_bin


def heat_bins(table: Mapping[int, Mapping[int, float]], most: int) -> tuple[dict[int, list[float]], int, int, int]:
    """The mean of at most `most` runs of steps for each rank; how many steps each stands for; and the first and the last step.

    >>> heat_bins({0: {5: 0.0, 6: 0.0, 7: 0.0}, 1: {5: 1.0, 6: 3.0, 7: 8.0}}, 2)
    ({0: [0.0, 0.0], 1: [2.0, 8.0]}, 2, 5, 7)
    """
    steps = sorted(next(iter(table.values())))
    per_bin = math.ceil(len(steps) / most)
    parts = [steps[start : start + per_bin] for start in range(0, len(steps), per_bin)]
    means = {rank: [fmean(row[step] for step in part) for part in parts] for rank, row in table.items()}
    return means, per_bin, steps[0], steps[-1]

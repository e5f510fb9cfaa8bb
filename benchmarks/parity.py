"""`parity`: does a model trained with a hook reach the same loss as one trained without it?

Ranks are processes that share memory, or with `--over shards` FSDP2's over gloo; `parity_rank.py` is what they do.

Note [Within noise]
All ways are trained from the same n seeds, which determine weights and data. Let s be the standard deviation of the dense runs'
final losses: how much a seed matters without compression. Two means of n dense runs each, from different seeds, would be within
2 s sqrt(2 / n) of each other in about 19 of 20 cases. A way is "within noise" if its mean is at most that much above the dense
mean; lower is always within. Only the dense spread is used, so a way does not pass by being erratic, and its own spread is shown
next to it. With few seeds s itself is rough, and can by chance be so small that nothing would pass; so a way whose loss is more
than noise but at most one percent above the dense one is distinguished from those that are worse.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.parity_rank import TASKS, Plan, Score, Scores, run_plan
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.world import bar, run_world
from gradwire.errors import UsageError
from gradwire.hooks.named import NAMED_HOOKS

_DENSE = "mean"
_DEVIATIONS = 2.0
_SLIGHT = 0.01


class Verdict(Enum):
    """How a way of training compares with the dense one."""

    NOISE = "within noise"
    SLIGHT = "within 1 %"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How one way of training compares with the dense one: see Note [Within noise]."""

    mean: float
    spread: float
    difference: float
    """Of the means."""
    percent: float
    """The mean over seeds of the difference, relative to the dense loss of the same seed."""
    allowed: float
    """How far above the dense mean it may be."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on the difference."""
        if self.difference <= self.allowed:
            return Verdict.NOISE
        return Verdict.SLIGHT if self.difference <= _SLIGHT * (self.mean - self.difference) else Verdict.WORSE


def spread(values: Sequence[float]) -> float:
    """The standard deviation, 0 for a single value; NaN if one of them is not finite."""
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) if len(values) > 1 else 0.0


def compare(losses: Sequence[float], dense: Sequence[float]) -> Comparison:
    """Final losses of the same seeds.

    >>> found = compare([1.5, 2.5, 3.5], [1.0, 2.0, 3.0])
    >>> found.difference, round(found.allowed, 3), found.verdict.value
    (0.5, 1.633, 'within noise')
    """
    paired = [(a - b) / b * 100 for a, b in zip(losses, dense, strict=True)]
    difference = statistics.fmean(losses) - statistics.fmean(dense)
    return Comparison(
        mean=statistics.fmean(losses),
        spread=spread(losses),
        difference=difference,
        percent=statistics.fmean(paired),
        allowed=_DEVIATIONS * spread(dense) * math.sqrt(2 / len(dense)),
    )


def run(args: argparse.Namespace, console: Console) -> Result:
    """Train, and compare."""
    shards, steps = args.over == "shards", args.steps or TASKS[args.task].steps
    others = (name for name in args.hooks if name != _DENSE and not (shards and NAMED_HOOKS[name].needs_optimizer))
    names = (_DENSE, *others)
    if args.task == "digits" and importlib.util.find_spec("sklearn") is None:
        raise UsageError(
            "parity --task digits: scikit-learn is not installed. pip install gradwire[lab], or --task text."
        )
    apart = [f"{name} every {NAMED_HOOKS[name].every}" for name in names if steps % NAMED_HOOKS[name].every]
    if apart:
        raise UsageError(
            f"parity --steps {steps}: replicas would differ at the end: they are averaged with {', '.join(apart)} steps. "
            "Choose a multiple, or omit the hook."
        )
    machine, began = describe(), time.perf_counter()
    plan = Plan(args.task, names, args.seeds, steps, shards)
    with bar(console, f"{args.task}, {args.ranks} ranks", len(names) * args.seeds) as on_report:
        results: list[Scores] = run_world(
            functools.partial(run_plan, plan), args.ranks, name="parity", timeout=args.timeout, on_report=on_report
        )
    scores = results[0]
    if not all(map(math.isfinite, _losses(scores[_DENSE]))):
        raise UsageError(
            f"parity --task {args.task} --ranks {args.ranks}: dense averaging itself has diverged (losses "
            f"{', '.join(f'{loss:.3g}' for loss in _losses(scores[_DENSE]))}), so there is nothing to compare with. "
            "Use fewer ranks, or report it."
        )
    settings = {
        "task": TASKS[args.task].words,
        "trained": f"{steps} steps on {args.ranks} ranks, as {args.over}, seeds 0 to {args.seeds - 1}; "
        f"{time.perf_counter() - began:.0f} s",
    }
    found = {name: compare(_losses(scores[name]), _losses(scores[_DENSE])) for name in names}
    return Result("parity", machine, settings, [figures_of(scores, found)], lines_of(found))


def _losses(scores: Sequence[Score]) -> list[float]:
    return [score.loss for score in scores]


def figures_of(scores: Scores, found: Mapping[str, Comparison]) -> Figures:
    """One row per hook."""
    rows = {
        name: {
            "name": f"{name}\n[dim]{NAMED_HOOKS[name].words}[/dim]",
            "losses": _losses(scores[name]),
            "mean": one.mean,
            "spread": one.spread,
            "difference": None if name == _DENSE else one.difference,
            "percent": one.percent,
            "accuracy": statistics.fmean(score.accuracy for score in scores[name]),
            "verdict": None if name == _DENSE else one.verdict.value,
        }
        for name, one in found.items()
    }
    columns = (
        Column("mean", "loss", fixed(4), "spread", "± {:.4f}".format),
        Column("difference", "more than\ndense", "{:+.4f}".format, "percent", "{:+.1f} %".format),
        Column("accuracy", "accuracy", "{:.1%}".format),
        Column("verdict", "verdict"),
    )
    caption = (
        "Loss on held-out data: mean and standard deviation over seeds. More than dense: difference of the means, and "
        f"below it the mean of the seeds' differences in percent. Within noise: at most {found[_DENSE].allowed:.4f} more."
    )
    return Figures(rows, columns, caption, first="hook")


def lines_of(found: Mapping[str, Comparison]) -> list[str]:
    """What the figures mean, as sentences."""
    lines = []
    for verdict in Verdict:
        names = [name for name, one in found.items() if one.verdict is verdict and name != _DENSE]
        if names:
            lines.append(f"{verdict.value.capitalize()}: {', '.join(names)}.")
    return lines

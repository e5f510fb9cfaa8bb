"""`gradwire lab parity`: does a model trained with a hook reach the same loss as one trained without it?

Ranks are processes that share memory; `tasks.py` is what they do, `noise.py` the rule by which two results count as equal.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.cli.arguments import at_least
from gradwire.cli.experiment.bar import bar
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.recipes import RECIPES, names_of
from gradwire.cli.experiment.report import add_json_option, new_table, present
from gradwire.cli.experiment.world import TIMEOUT_HELP, run_world
from gradwire.cli.lab.noise import Comparison, Verdict, compare
from gradwire.cli.lab.tasks import TASKS, Plan, Score, Scores, run_plan
from gradwire.errors import UsageError

_DENSE = "mean"
_DEFAULT = ("quantize8", "quantize4", "quantize1", "power_sgd", "top_k", "diloco")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire lab parity` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "parity",
        help="the final loss with each hook, compared with dense averaging",
        description="Train a small model with dense averaging and with each hook, from several seeds, with the same number of "
        "steps, and compare the losses on held-out data. A hook is within noise if its mean loss is no further above the dense one "
        "than two means of dense runs would be apart: 2 s sqrt(2 / seeds), s being the standard deviation of the dense runs.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add(
        "--task",
        choices=tuple(TASKS),
        default="digits",
        metavar="TASK",
        help="digits: an MLP on scikit-learn's digits; text: a transformer on some of the standard library's source, until "
        "convergence; text-short: a larger one on all of it, far from convergence (default: %(default)s)",
    )
    add("--seeds", type=at_least(2), default=3, help="number of seeds (default: %(default)s)")
    add("--ranks", type=at_least(1), default=4, help="processes on this machine (default: %(default)s)")
    add(
        "--steps",
        type=at_least(1),
        help=f"optimizer steps (default: {', '.join(f'{n} {t.steps}' for n, t in TASKS.items())})",
    )
    add(
        "--hooks",
        type=names_of(list(RECIPES)),
        metavar="A,B",
        help=f"in addition to dense averaging: {', '.join(n for n in RECIPES if n != _DENSE)} (default: {', '.join(_DEFAULT)})",
    )
    add("--timeout", type=at_least(1), default=600, metavar="SECONDS", help=TIMEOUT_HELP)
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, and show the results."""
    names, steps = _names(args.hooks), args.steps or TASKS[args.task].steps
    if args.task == "digits" and importlib.util.find_spec("sklearn") is None:
        raise UsageError(
            "lab parity --task digits: scikit-learn is not installed. pip install gradwire[lab], or --task text."
        )
    apart = [f"{name} every {RECIPES[name].every}" for name in names if steps % RECIPES[name].every]
    if apart:
        raise UsageError(
            f"lab parity --steps {steps}: replicas would differ at the end: they are averaged with {', '.join(apart)} steps. "
            "Choose a multiple, or omit the hook."
        )
    machine, console = describe(), Console(highlight=False)
    began = time.perf_counter()
    plan = Plan(args.task, names, args.seeds, steps)
    with bar(console, f"{args.task}, {args.ranks} ranks", len(names) * args.seeds) as on_report:
        results: list[Scores] = run_world(
            functools.partial(run_plan, plan), args.ranks, name="lab parity", timeout=args.timeout, on_report=on_report
        )
    scores = results[0]
    if not all(map(math.isfinite, _losses(scores[_DENSE]))):
        raise UsageError(
            f"lab parity --task {args.task} --ranks {args.ranks}: dense averaging itself has diverged (losses "
            f"{', '.join(f'{loss:.3g}' for loss in _losses(scores[_DENSE]))}), so there is nothing to compare with. "
            "Use fewer ranks, or report it."
        )
    facts = {
        **machine,
        "task": TASKS[args.task].words,
        "trained": f"{steps} steps on {args.ranks} ranks, seeds 0 to {args.seeds - 1}; {time.perf_counter() - began:.0f} s",
    }
    found = {name: compare(_losses(scores[name]), _losses(scores[_DENSE])) for name in names}
    present(
        facts,
        [table(scores, found)],
        lines(found),
        data=as_json(args.task, facts, scores, found),
        json_file=args.json,
        console=console,
    )
    return 0


def _names(asked: Sequence[str] | None) -> tuple[str, ...]:
    names = _DEFAULT if asked is None else asked
    return (_DENSE, *(name for name in names if name != _DENSE))


def _losses(scores: Sequence[Score]) -> list[float]:
    return [score.loss for score in scores]


def table(scores: Scores, found: Mapping[str, Comparison]) -> Table:
    """One row per hook."""
    allowed = found[_DENSE].allowed
    caption = (
        "Loss on held-out data: mean and standard deviation over seeds. More than dense: difference of the means, and "
        f"below it the mean of the seeds' differences in percent. Within noise: at most {allowed:.4f} more."
    )
    made = new_table("hook", "loss", "more than\ndense", "accuracy", "verdict", caption=caption)
    for name, one in found.items():
        accuracy = statistics.fmean(score.accuracy for score in scores[name])
        more = "" if name == _DENSE else f"{one.difference:+.4f}\n[dim]{one.percent:+.1f} %[/dim]"
        made.add_row(
            f"{name}\n[dim]{RECIPES[name].words}[/dim]",
            f"{one.mean:.4f}\n[dim]± {one.spread:.4f}[/dim]",
            more,
            f"{accuracy:.1%}",
            "" if name == _DENSE else one.verdict.value,
        )
    return made


def lines(found: Mapping[str, Comparison]) -> list[str]:
    """What the figures mean, as sentences."""
    said = []
    for verdict in Verdict:
        names = [name for name, one in found.items() if one.verdict is verdict and name != _DENSE]
        if names:
            said.append(f"{verdict.value.capitalize()}: {', '.join(names)}.")
    return said


def as_json(task: str, facts: Mapping[str, str], scores: Scores, found: Mapping[str, Comparison]) -> dict[str, Any]:
    """All figures as plain data, with every seed."""
    return {
        "experiment": "parity",
        "task": task,
        "facts": dict(facts),
        "allowed": found[_DENSE].allowed,
        "hooks": {
            name: {
                "words": RECIPES[name].words,
                "losses": _losses(scores[name]),
                "accuracies": [score.accuracy for score in scores[name]],
                "mean": one.mean,
                "spread": one.spread,
                "difference": one.difference,
                "percent": one.percent,
                "verdict": one.verdict.value,
            }
            for name, one in found.items()
        },
    }

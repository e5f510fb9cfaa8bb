"""`gradwire bench stragglers`: whether a slow rank is found and named, and healthy runs are left alone.

Ranks sleep instead of computing: `sleeping_ranks.py` is what a rank does. Runs with a delay and healthy ones take
turns: the prediction "without this rank a step takes" is compared with the healthy ones around it, because the load of the machine
changes, and with it the step.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.cli.arguments import at_least, positive
from gradwire.cli.bench.sleeping_ranks import Delay, Sleeping, train
from gradwire.cli.experiment.bar import bar
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.report import add_json_option, present
from gradwire.cli.experiment.world import TIMEOUT, TIMEOUT_HELP, run_world
from gradwire.observe.rings.ring import read_rings
from gradwire.observe.stragglers.detect import WINDOW, Straggler
from gradwire.observe.stragglers.step_times import step_times
from gradwire.observe.stragglers.steps import Phase
from gradwire.observe.stragglers.straggler_watch import find_stragglers

_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
_WARM_UP = 2
"""Steps before those that are compared: buckets are rebuilt after the first."""
_TOLERANCE = 0.05
"""The most by which the prediction may be wrong."""
_KINDS = ("shared_memory", "gloo")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench stragglers` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "stragglers",
        help="whether a slow rank is found, and nothing else",
        description="Ranks that sleep instead of computing are trained and recorded, in turns as they should be and with one of "
        "them slower in its data, its forward or its backward. Each delay must be found, with the right rank and phase; the step "
        "time predicted without it must be within 5 % of the healthy runs before and after, if these agree; and in a healthy run "
        "nothing may be found. The exit code is 1 if any of that fails.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add("--ranks", type=at_least(2), default=8, help="number of ranks (default: %(default)s)")
    add("--runs", type=at_least(1), default=50, help="runs with a delay, and one more without (default: %(default)s)")
    add(
        "--delay",
        type=positive,
        default=0.2,
        metavar="SHARE",
        help="how much longer the phase takes on the slow rank, as a share of it (default: %(default)s)",
    )
    add(
        "--phase",
        type=positive,
        default=0.1,
        metavar="SECONDS",
        help="how long each of the three phases takes (default: %(default)s)",
    )
    add("--kind", choices=_KINDS, default=_KINDS[0], metavar="KIND", help="group: %(choices)s (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, help="chooses the slow ranks (default: %(default)s)")
    add("--timeout", type=at_least(1), default=TIMEOUT, metavar="SECONDS", help=TIMEOUT_HELP)
    add_json_option(parser)
    return parser


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was found in a run."""

    delay: Delay | None
    found: tuple[Straggler, ...]
    step_seconds: float
    healthy: tuple[float, ...] = ()
    """The steps of the healthy runs around it."""

    @property
    def is_right(self) -> bool:
        """Whether the right rank and phase were found, or rightly nothing."""
        expected = [] if self.delay is None else [(self.delay.rank, self.delay.phase)]
        return [(one.rank, one.phase) for one in self.found] == expected

    @property
    def error(self) -> float | None:
        """By which share of the healthy step the prediction was wrong. None: there was none to make."""
        if self.delay is None or not self.found:
            return None
        return self.found[0].without / median(self.healthy) - 1

    @property
    def is_comparable(self) -> bool:
        """Whether the healthy runs around it agree: otherwise the machine was too busy to judge the prediction."""
        return not self.healthy or max(self.healthy) <= (1 + _TOLERANCE) * min(self.healthy)

    @property
    def passed(self) -> bool:
        """Whether all is as it must be."""
        return self.is_right and (self.error is None or not self.is_comparable or abs(self.error) <= _TOLERANCE)

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        delay = self.delay
        return {
            "rank": None if delay is None else delay.rank,
            "phase": None if delay is None else delay.phase.name.lower(),
            "found": [one.as_dict() for one in self.found],
            "is_right": self.is_right,
            "step_seconds": self.step_seconds,
            "healthy_seconds": list(self.healthy),
            "prediction_error": self.error,
            "is_comparable": self.is_comparable,
        }


def run(args: argparse.Namespace) -> int:
    """Run all, show the results; 1 if anything was missed."""
    machine, console = describe(), Console(highlight=False)
    found: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder,
        bar(console, f"{args.ranks} ranks", 2 * args.runs + 1) as progress,
    ):
        runs = _plan(args, Path(folder))

        def complete(outcome: Outcome) -> None:
            found.append(outcome)
            progress(len(found))

        run_world(
            functools.partial(train, runs, args.kind, _examine),
            args.ranks,
            name="bench stragglers",
            timeout=args.timeout,
            on_report=complete,
        )
    outcomes = _compared(found)
    settings = {
        "world": f"{args.ranks} ranks over {args.kind}, data, forward and backward of {args.phase * 1e3:g} ms each, by sleep",
        "delay": f"{args.delay:.0%} in one phase of one rank",
        "measured": f"{len(runs)} runs of {WINDOW} steps, in turns healthy and delayed, seed {args.seed}",
    }
    present(
        {**machine, **settings},
        [_table(outcomes)],
        _lines(outcomes),
        data=_as_json(machine, settings, outcomes),
        json_file=args.json,
        console=console,
    )
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _plan(args: argparse.Namespace, folder: Path) -> list[Sleeping]:
    """Healthy and delayed runs in turns, the last one healthy. The phases take turns too, the ranks are random."""
    rng = random.Random(args.seed)
    delays: list[Delay | None] = [None]
    for number in range(args.runs):
        delays += [Delay(rng.randrange(args.ranks), _PHASES[number % len(_PHASES)], args.delay), None]
    steps = WINDOW + _WARM_UP
    return [Sleeping(folder / f"run-{number}", steps, args.phase, delay) for number, delay in enumerate(delays)]


def _examine(run: Sleeping) -> Outcome:
    """Look at what was recorded, and remove it: each run takes 4 MiB per rank."""
    found = find_stragglers(run.directory)
    step = median(one.seconds for ring in read_rings(run.directory) for one in step_times(ring.records))
    shutil.rmtree(run.directory)
    return Outcome(run.delay, tuple(found), step)


def _compared(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """With the steps of the healthy runs before and after each that was delayed."""
    return [
        one
        if one.delay is None
        else replace(one, healthy=tuple(outcomes[near].step_seconds for near in (i - 1, i + 1)))
        for i, one in enumerate(outcomes)
    ]


def _table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        caption="Prediction: how far the step predicted without the slow rank is from that of the healthy runs around it."
    )
    table.add_column("runs with")
    for head in ("runs", "right", "step\nms", "prediction off by\nmedian", "at most"):
        table.add_column(head, justify="right")
    for phase in (None, *_PHASES):
        of_this = [one for one in outcomes if (one.delay.phase if one.delay else None) is phase]
        if of_this:
            errors = [abs(one.error) for one in of_this if one.error is not None and one.is_comparable]
            table.add_row(
                "no delay" if phase is None else f"a delay in {phase.value}",
                str(len(of_this)),
                str(sum(one.is_right for one in of_this)),
                f"{median(one.step_seconds for one in of_this) * 1e3:.1f}",
                f"{median(errors):.1%}" if errors else "",
                f"{max(errors):.1%}" if errors else "",
            )
    return table


def _lines(outcomes: Sequence[Outcome]) -> list[str]:
    delayed, healthy = ([one for one in outcomes if (one.delay is None) is quiet] for quiet in (False, True))
    lines = [
        f"The right rank and phase in {sum(one.is_right for one in delayed)} of {len(delayed)} runs with a delay; "
        f"alarms in {sum(not one.is_right for one in healthy)} of {len(healthy)} without."
    ]
    unclear = sum(not one.is_comparable for one in outcomes)
    if unclear:
        lines.append(
            f"In {unclear} run{'s' * (unclear > 1)} the prediction is not judged: the machine was so busy that the healthy runs "
            f"before and after differ by more than {_TOLERANCE:.0%}."
        )
    for number, one in enumerate(outcomes):
        if not one.passed:
            was = "no delay" if one.delay is None else f"rank {one.delay.rank} was slow in {one.delay.phase.value}"
            found = "; ".join(map(str, one.found)) or "nothing was found"
            off = "" if one.error is None else f" (prediction off by {one.error:+.1%})"
            lines.append(f"Run {number}: {was}; {found}{off}.")
    return lines


def _as_json(machine: Mapping[str, str], settings: Mapping[str, str], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "benchmark": "stragglers",
        "machine": dict(machine),
        "settings": dict(settings),
        "runs": [one.as_dict() for one in outcomes],
    }

"""`python -m detection.stragglers`: is a slow rank found and named, and a healthy run left alone?

Ranks sleep instead of computing: `sleeping_ranks.py`. Runs with one rank slower in its data, its forward or its backward take turns
with healthy ones. Each delay must be found, with the right rank and phase; the step time predicted without it must be within 5 % of
the healthy runs before and after, if these agree (the load of the machine changes, and with it the step); and in a healthy run
nothing may be found. The exit code is 1 if any of that fails.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from detection.sleeping_ranks import Delay, Sleeping, train
from gradwire.cli.arguments import at_least, positive
from gradwire.observe.rings.ring import read_rings
from gradwire.observe.stragglers.detect import WINDOW, Straggler, find_stragglers
from gradwire.observe.stragglers.steps import Phase, step_times
from gradwire.testing import run_ranks

_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD)
_WARM_UP = 2
"""Steps before those that are compared: buckets are rebuilt after the first."""
_TOLERANCE = 0.05
"""The most by which the prediction may be wrong."""
_KINDS = ("shared_memory", "gloo")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m detection.stragglers", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=at_least(2), default=8, metavar="N", help="number of ranks (default: %(default)s)")
    add(
        "--runs",
        type=at_least(1),
        default=50,
        metavar="N",
        help="runs with a delay, and one more without (default: %(default)s)",
    )
    add(
        "--delay",
        type=positive,
        default=0.2,
        metavar="SHARE",
        help="of the phase, on the slow rank (default: %(default)s)",
    )
    add(
        "--phase",
        type=positive,
        default=0.1,
        metavar="SECONDS",
        help="of each of the three phases (default: %(default)s)",
    )
    add("--kind", choices=_KINDS, default=_KINDS[0], help="of group (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, metavar="N", help="chooses the slow ranks (default: %(default)s)")
    add("--timeout", type=positive, default=300, metavar="SECONDS", help="of one run (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write all runs to FILE")
    return parser.parse_args(words)


@dataclass(frozen=True, slots=True)
class Trial:
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
            "found": [str(one) for one in self.found],
            "is_right": self.is_right,
            "step_seconds": self.step_seconds,
            "healthy_seconds": list(self.healthy),
            "prediction_error": self.error,
            "is_comparable": self.is_comparable,
        }


def main(words: Sequence[str]) -> int:
    """Run all, print the results; 1 if anything was missed."""
    args = parse(words)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix="gradwire-stragglers-") as folder:
        runs = _plan(args, Path(folder))
        for run in runs:
            run_ranks(functools.partial(train, run), args.ranks, kind=args.kind, timeout=args.timeout)
            trials.append(_examine(run))
            words_of_this = "right" if trials[-1].is_right else "WRONG"
            print(f"{len(trials)}/{len(runs)}: {words_of_this}", file=sys.stderr, flush=True)
    trials = _compared(trials)
    print("\n".join(_lines(trials)))
    if args.json is not None:
        args.json.write_text(json.dumps([one.as_dict() for one in trials], indent=1))
    return 0 if all(trial.passed for trial in trials) else 1


def _plan(args: argparse.Namespace, folder: Path) -> list[Sleeping]:
    """Healthy and delayed runs in turns, the last one healthy. The phases take turns too, the ranks are random."""
    rng = random.Random(args.seed)
    delays: list[Delay | None] = [None]
    for number in range(args.runs):
        delays += [Delay(rng.randrange(args.ranks), _PHASES[number % len(_PHASES)], args.delay), None]
    steps = WINDOW + _WARM_UP
    return [Sleeping(folder / f"run-{number}", steps, args.phase, delay) for number, delay in enumerate(delays)]


def _examine(run: Sleeping) -> Trial:
    """Look at what was recorded, and remove it: each run takes 4 MiB per rank."""
    found = find_stragglers(run.directory)
    step = median(one.seconds for ring in read_rings(run.directory) for one in step_times(ring.records))
    shutil.rmtree(run.directory)
    return Trial(run.delay, tuple(found), step)


def _compared(trials: Sequence[Trial]) -> list[Trial]:
    """With the steps of the healthy runs before and after each that was delayed."""
    return [
        one if one.delay is None else replace(one, healthy=tuple(trials[near].step_seconds for near in (i - 1, i + 1)))
        for i, one in enumerate(trials)
    ]


def _lines(trials: Sequence[Trial]) -> list[str]:
    delayed, healthy = ([one for one in trials if (one.delay is None) is quiet] for quiet in (False, True))
    lines = [
        f"The right rank and phase in {sum(one.is_right for one in delayed)} of {len(delayed)} runs with a delay; "
        f"alarms in {sum(not one.is_right for one in healthy)} of {len(healthy)} without."
    ]
    errors = [abs(one.error) for one in delayed if one.error is not None and one.is_comparable]
    if errors:
        lines.append(f"The predicted step is off by {median(errors):.1%} in the median, at most {max(errors):.1%}.")
    unclear = sum(not one.is_comparable for one in trials)
    if unclear:
        lines.append(
            f"In {unclear} run{'s' * (unclear > 1)} the prediction is not judged: the machine was so busy that the healthy runs "
            f"before and after differ by more than {_TOLERANCE:.0%}."
        )
    for number, one in enumerate(trials):
        if not one.passed:
            was = "no delay" if one.delay is None else f"rank {one.delay.rank} was slow in {one.delay.phase.value}"
            found = "; ".join(map(str, one.found)) or "nothing was found"
            off = "" if one.error is None else f" (prediction off by {one.error:+.1%})"
            lines.append(f"Run {number}: {was}; {found}{off}.")
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

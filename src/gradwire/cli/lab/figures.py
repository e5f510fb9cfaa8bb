"""The figures of `gradwire lab slowlink`: a table, sentences, and plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from gradwire.cli.lab.contenders import CONTENDERS
from gradwire.cli.lab.curve import Curve, Point

_MB = 1e6


@dataclass(frozen=True, slots=True)
class Race:
    """All curves over a link of `mbit`; the first is the reference."""

    mbit: float
    curves: Sequence[Curve]

    @property
    def reference(self) -> Curve:
        """torch's DDP."""
        return self.curves[0]

    @property
    def mark(self) -> float:
        """The target loss."""
        return self.reference.mark

    def reached(self, curve: Curve) -> Point | None:
        """Where a contender reached the target, if it did."""
        return curve.reached(self.mark)

    def ratio(self, curve: Curve) -> float | None:
        """How many times faster than the reference it reached the target."""
        mine, theirs = self.reached(curve), self.reached(self.reference)
        return None if mine is None or theirs is None else theirs.seconds / mine.seconds

    @property
    def best(self) -> Curve | None:
        """The first to reach it, other than the reference."""
        ratios = {curve.name: ratio for curve in self.curves[1:] if (ratio := self.ratio(curve)) is not None}
        return max(self.curves[1:], key=lambda curve: ratios.get(curve.name, 0.0)) if ratios else None


HEADS = ("contender", "s/step", "MB/step", "steps to target", "seconds to target", "speedup")


def cells(race: Race, curve: Curve) -> list[str]:
    """The row of a contender, under `HEADS`."""
    point, ratio = race.reached(curve), race.ratio(curve)
    row = [curve.name, f"{curve.step_seconds:.3f}", f"{curve.step_bytes / _MB:.3g}"]
    if point is None:
        return [*row, f"not in {curve.last.steps}", f"not in {curve.last.seconds:.0f}", "-"]
    return [*row, str(point.steps), f"{point.seconds:.1f}", "-" if ratio is None else f"{ratio:.1f}"]


def table(race: Race) -> Table:
    """One row per contender."""
    made = Table(
        title=f"{race.mbit:g} Mbit/s",
        caption=f"The target is {race.mark:.3f} nats per character, a thousandth above the final loss of torch's DDP. MB are what "
        "one rank sends. Per step: mean over the whole run. Speedup: torch's seconds to the target divided by these.",
    )
    for number, head in enumerate(HEADS):
        words = head.replace(" to ", "\nto ").replace("times ", "times\n").replace(" a ", "\na ")
        made.add_column(words, justify="right" if number else "left", no_wrap=number == 0)
    for curve in race.curves:
        made.add_row(*cells(race, curve), style="bold" if curve is race.best else "")
    return made


def lines(race: Race) -> list[str]:
    """What the figures mean, as sentences."""
    point = None if race.best is None else race.reached(race.best)
    if race.best is None or point is None:
        return ["Only torch's DDP reached the target."]
    said = [
        f"{race.best.name} ({CONTENDERS[race.best.name].words}) was the first to reach the target, in {point.seconds:.1f} s: "
        f"{race.ratio(race.best):.1f} times faster than torch's DDP."
    ]
    late = [curve.name for curve in race.curves[1:] if (race.ratio(curve) or 0.0) <= 1.0]
    if late:
        said.append(f"Not worthwhile on this link: {', '.join(late)}.")
    return said


def as_json(race: Race, facts: Mapping[str, Any]) -> dict[str, Any]:
    """All figures as plain data, with every evaluation."""
    return {
        "experiment": "slowlink",
        "facts": dict(facts),
        "mbit": race.mbit,
        "mark": race.mark,
        "contenders": {curve.name: _curve(race, curve) for curve in race.curves},
    }


def _curve(race: Race, curve: Curve) -> dict[str, Any]:
    point = race.reached(curve)
    return {
        "words": CONTENDERS[curve.name].words,
        "seconds_a_step": curve.step_seconds,
        "bytes_a_step": curve.step_bytes,
        "to_the_mark": None
        if point is None
        else {"steps": point.steps, "seconds": point.seconds, "bytes": point.nbytes},
        "times_sooner": race.ratio(curve),
        "points": [
            {"steps": p.steps, "seconds": p.seconds, "bytes": p.nbytes, "loss": p.loss, "whole": p.whole}
            for p in curve.points
        ],
    }

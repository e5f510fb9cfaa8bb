"""`slowlink`: how long a model takes to reach a given loss over a slow link, with torch's DDP and with each hook.

Ranks are processes on separate hosts (`gradwire.lab.hosts`), joined by a real link of limited rate; `slowlink_rank.py` is what a
rank does.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from benchmarks import plot
from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed
from benchmarks.slowlink_contenders import CONTENDERS, REFERENCE, Simulated, default_names
from benchmarks.slowlink_rank import SIZES, Curve, News, Plan, Point, run_contenders, start
from benchmarks.world import run_world
from gradwire.errors import GroupError, UsageError
from gradwire.lab import Host, hosts, why_not


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


def run(args: argparse.Namespace, console: Console) -> Result:
    """Train, and compare."""
    names = default_names() if args.hooks is None else (REFERENCE, *(n for n in args.hooks if n != REFERENCE))
    plot.check_plot("--plot", args.plot)
    if not args.throttled and (reason := why_not(mbit=args.mbit)) is not None:
        raise UsageError(
            f"slowlink --hosts {args.hosts} --mbit {args.mbit:g}: hosts cannot be created here: {reason}. "
            "--throttled simulates the link instead."
        )
    machine = describe()
    plan = Plan(
        names=names,
        size=args.size,
        batch=args.batch,
        rate=args.rate,
        seed=args.seed,
        steps=args.steps,
        seconds=args.seconds,
        exam_every=args.exam_every,
        patience=args.patience,
        link=Simulated(args.mbit, args.latency_ms) if args.throttled else None,
    )
    curves: list[Curve] = []
    failure: GroupError | None = None
    with _machines(args) as machines, _progress(console, names, curves) as on_report:
        try:
            run_world(
                functools.partial(run_contenders, plan),
                args.hosts,
                name="slowlink",
                on=machines,
                timeout=args.timeout,
                on_report=on_report,
            )
        except GroupError as error:
            if not curves:
                raise
            failure = error  # minutes of training are not lost because a later contender failed
            finished = ", ".join(curve.name for curve in curves)
            failure.add_note(f"The results above are those of {finished}, which had finished.")
    parameters = sum(p.numel() for p in start(plan.size, plan.seed).parameters())
    race, settings = Race(args.mbit, curves), _settings(args, plan, parameters)
    if args.plot is not None:
        draw(args.plot, race, {**machine, **settings})
    return Result("slowlink", machine, settings, [figures_of(race)], lines_of(race), error=failure)


def figures_of(race: Race) -> Figures:
    """One row per contender."""
    rows: dict[str, dict[str, Any]] = {}
    for curve in race.curves:
        point = race.reached(curve)
        rows[curve.name] = {
            "description": CONTENDERS[curve.name].words,
            "seconds_per_step": curve.step_seconds,
            "bytes_per_step": curve.step_bytes,
            "steps": f"not in {curve.last.steps}" if point is None else point.steps,
            "seconds": f"not in {curve.last.seconds:.0f}" if point is None else point.seconds,
            "speedup": race.ratio(curve),
            "link_busy": curve.busy,
            "points": [asdict(point) for point in curve.points],
        }
    columns = (
        Column("seconds_per_step", "s/step", fixed(3)),
        Column("bytes_per_step", "MB/step", lambda count: f"{count / 1e6:.3g}"),
        Column("steps", "steps\nto target"),
        Column("seconds", "seconds\nto target", fixed(1)),
        Column("speedup", "speedup", fixed(1)),
        Column("link_busy", "link\nbusy", lambda share: f"{share:.0%}"),
    )
    caption = (
        f"The target is {race.mark:.3f} nats per character, a thousandth above the final loss of torch's DDP. MB are what "
        "one rank sends. Per step: mean over the whole run. Speedup: torch's seconds to the target divided by these. Link busy: "
        "sent while buckets were reduced, of what TCP sends over it in that time."
    )
    best = race.best.name if race.best is not None else ""
    return Figures(rows, columns, caption, title=f"{race.mbit:g} Mbit/s", first="contender", best=best)


def lines_of(race: Race) -> list[str]:
    """What the figures mean, as sentences. Speedups are compared as they are shown, with one digit."""
    speedups = {curve.name: race.ratio(curve) for curve in race.curves[1:]}
    shown = {name: None if ratio is None else round(ratio, 1) for name, ratio in speedups.items()}
    faster = [name for name, speedup in shown.items() if speedup is not None and speedup > 1.0]
    lines = []
    if race.best is not None and race.best.name in faster:
        lines.append(
            f"{race.best.name} ({CONTENDERS[race.best.name].words}) reached the target first, {shown[race.best.name]:.1f} times "
            "as fast as torch's DDP."
        )
    elif shown:
        lines.append("No contender was faster than torch's DDP on this link.")
    for words, names in (
        ("As fast as torch's DDP", [name for name, speedup in shown.items() if speedup == 1.0]),
        ("Slower than torch's DDP", [name for name, speedup in shown.items() if speedup is not None and speedup < 1.0]),
        ("Did not reach the target", [name for name, speedup in shown.items() if speedup is None]),
    ):
        if names:
            lines.append(f"{words}: {', '.join(names)}.")
    return lines


def draw(file: Path, race: Race, facts: Mapping[str, str]) -> None:
    """Loss against seconds, and against bytes."""
    panels = []
    for label, place in (
        ("seconds of training", lambda point: point.seconds),
        ("MB that a rank has sent", lambda point: point.nbytes / 1e6),
    ):
        lines = []
        for curve in race.curves:
            points, reached, ratio = (
                [p for p in curve.points if p.steps and p.whole],
                race.reached(curve),
                race.ratio(curve),
            )
            name = curve.name if ratio is None or curve is race.reference else f"{curve.name}  {ratio:.1f}x"
            marked = None if reached is None else (place(reached), reached.loss)
            xs, ys = [place(p) for p in points], [p.loss for p in points]
            lines.append(plot.Line(name, xs, ys, marked=marked, is_reference=curve.name.startswith("torch")))
        panels.append(plot.Panel("", label, lines, level=race.mark))
    plot.draw(
        file,
        panels,
        title=f"Reaching torch DDP's loss of {race.mark:.3f} over {race.mbit:g} Mbit/s; a large marker where it was reached",
        footer=f"{facts['model']}\n{facts['link']}\n{facts['cpu']}; {facts['software']}",
        y_label="loss on held-out text (nats per character)",
        log="x",
    )


@contextmanager
def _machines(args: argparse.Namespace) -> Iterator[Sequence[Host]]:
    if args.throttled:
        yield ()
    else:
        with hosts(args.hosts, mbit=args.mbit) as machines:
            yield machines


@contextmanager
def _progress(console: Console, names: Sequence[str], curves: list[Curve]) -> Iterator[Any]:
    """A progress bar of contenders, and of the current one; finished ones are added to `curves`.

    It is drawn when there is progress, not continuously by a thread: the ranks need the cores.
    """
    progress = Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[words]}"),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with progress:
        whole = progress.add_task("contenders", total=len(names), words="starting")
        current = progress.add_task("", total=None, words="", visible=False)

        def on_report(news: News | None) -> None:
            if news is None:
                return
            point = news.point
            words = f"step {point.steps}, {point.seconds:.1f} s, loss {point.loss:.3f}"
            if news.curve is not None:
                curves.append(news.curve)
            done = len(curves)
            progress.update(whole, completed=done, words=f"{done} of {len(names)}")
            progress.update(current, description=news.name, words=words, visible=True, refresh=True)
            if news.curve is not None and not console.is_terminal:
                console.print(f"{news.name}: {words}")

        progress.refresh()
        yield on_report


def _settings(args: argparse.Namespace, plan: Plan, parameters: int) -> dict[str, str]:
    if args.throttled:
        link = f"simulated, {args.mbit:g} Mbit/s and {args.latency_ms:g} ms for each of {args.hosts} ranks that share memory"
    else:
        link = f"{args.hosts} network namespaces as hosts, one rank on each, {args.mbit:g} Mbit/s (veth, tc tbf), gloo"
    length = f"{plan.steps} steps" if plan.seconds is None else f"{plan.seconds:g} s"
    return {
        "link": link,
        "model": f"transformer, {parameters:,} parameters ({parameters * 4 / 1e6:.1f} MB float32), one thread per rank",
        "step": f"{plan.batch} x {SIZES[plan.size].context} characters per rank, AdamW at {plan.rate:g}, seed {plan.seed}",
        "measured": f"torch's DDP for {length}; loss on held-out text every {plan.exam_every} steps, not timed",
    }

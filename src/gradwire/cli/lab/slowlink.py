"""`gradwire lab slowlink`: how long a model takes to reach a given loss over a slow link, with torch's DDP and with each hook.

Ranks are processes on separate hosts (`gradwire.lab.hosts`), joined by a real link whose rate is limited; `curve.py` is what a
rank does, `figures.py` computes the figures, `charts.py` draws them.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from gradwire.cli.arguments import at_least, positive
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.plot_file import check
from gradwire.cli.experiment.recipes import names_of
from gradwire.cli.experiment.report import add_json_option, present
from gradwire.cli.experiment.world import TIMEOUT, TIMEOUT_HELP, run_world
from gradwire.cli.lab import charts
from gradwire.cli.lab.contenders import CONTENDERS, REFERENCE, Simulated, default_names
from gradwire.cli.lab.curve import Curve, News, Plan, run_contenders
from gradwire.cli.lab.figures import Race, as_json, lines, table
from gradwire.cli.lab.learner import SIZES, start
from gradwire.errors import GroupError, UsageError
from gradwire.lab import Host, hosts, why_not


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire lab slowlink` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "slowlink",
        help="time to a given loss over a slow link, for each hook",
        description="Train a transformer on the source of the Python standard library over a slow link: first with torch's "
        "DistributedDataParallel over gloo, then with others until each has reached the final loss of that one. Ranks "
        "are on separate hosts, which are network namespaces joined by a link of limited rate; that needs root. Same seed, "
        "same order of data and same optimizer for all.",
    )
    add = functools.partial(parser.add_argument, metavar="N")
    add("--mbit", type=positive, default=100.0, help="megabits per second of each host (default: %(default)g)")
    add("--hosts", type=at_least(2), default=2, help="number of hosts, one rank on each (default: %(default)s)")
    add(
        "--hooks",
        type=names_of(list(CONTENDERS)),
        metavar="A,B",
        help=f"contenders after torch's DDP: {', '.join(n for n in CONTENDERS if n != REFERENCE)} "
        "(default: all but bf16, fp16, quantize2, sign and dgc)",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--steps", type=at_least(1), default=50, metavar="N", help="steps of torch's DDP (default: %(default)s)"
    )
    length.add_argument("--seconds", type=positive, metavar="S", help="or train torch's DDP for this long")
    add(
        "--size",
        choices=tuple(SIZES),
        default="10m",
        metavar="SIZE",
        help="size of the model: %(choices)s (default: %(default)s)",
    )
    add(
        "--batch",
        type=at_least(1),
        default=1,
        help="sequences of 64 characters per rank and step (default: %(default)s)",
    )
    add("--rate", type=positive, default=3e-4, metavar="R", help="learning rate of AdamW (default: %(default)g)")
    add("--seed", type=at_least(0), default=0, help="seed of weights and data (default: %(default)s)")
    add("--exam-every", type=at_least(1), default=5, help="steps between two evaluations (default: %(default)s)")
    add(
        "--patience",
        type=positive,
        default=3.0,
        metavar="X",
        help="others end after X times the seconds or steps of torch's DDP (default: %(default)g)",
    )
    parser.add_argument(
        "--throttled",
        action="store_true",
        help="no hosts: ranks of this machine share memory, and a simulated link makes them wait. Does not need root",
    )
    add(
        "--latency-ms",
        type=positive,
        default=0.5,
        metavar="MS",
        help="latency of the simulated link (default: %(default)g)",
    )
    add("--timeout", type=at_least(1), default=TIMEOUT, metavar="SECONDS", help=TIMEOUT_HELP)
    add("--plot", type=Path, metavar="FILE", help="also draw loss against seconds and bytes (.png, .svg or .pdf)")
    add("--html", type=Path, metavar="FILE", help="also write a page with the table and the same charts")
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Train, and show the results."""
    names = _names(args.hooks)
    if args.plot is not None:
        check("--plot", args.plot, extra="lab")
    if args.html is not None:
        check("--html", args.html, kinds=(".html", ".htm"), extra="lab")
    if not args.throttled and (reason := why_not(mbit=args.mbit)) is not None:
        raise UsageError(
            f"lab slowlink --hosts {args.hosts} --mbit {args.mbit:g}: hosts cannot be created here: {reason}. "
            "--throttled simulates the link instead."
        )
    machine, console = describe(), Console(highlight=False)
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
                name="lab slowlink",
                on=machines,
                timeout=args.timeout,
                on_report=on_report,
            )
        except GroupError as error:
            if not curves:
                raise
            failure = error  # minutes of training are not lost because a later contender failed
    parameters = sum(p.numel() for p in start(plan.size, plan.seed).parameters())
    race = Race(args.mbit, curves)
    facts = {**machine, **_settings(args, plan, parameters)}
    if args.plot is not None:
        charts.draw(args.plot, race, facts)
    if args.html is not None:
        charts.write_page(args.html, race, facts)
    present(facts, [table(race)], lines(race), data=as_json(race, facts), json_file=args.json, console=console)
    for file in filter(None, (args.plot, args.html)):
        console.print(f"Charts are in {file}.", style="dim")
    if failure is not None:
        failure.add_note(
            f"The results above are those of {', '.join(curve.name for curve in curves)}, which had finished."
        )
        raise failure
    return 0


def _names(asked: Sequence[str] | None) -> tuple[str, ...]:
    """The reference, then the other contenders."""
    if asked is None:
        return default_names()
    return (REFERENCE, *(name for name in asked if name != REFERENCE))


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

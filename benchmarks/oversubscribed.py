"""`oversubscribed`: shared memory against gloo with more ranks than cores, or on cores that other programs use.

Collectives, a training step and the comparison of `gradwire demo`, each in turns with gloo in the same rank processes, on idle
cores and while other processes keep them busy.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from torch._C._distributed_c10d import PrefixStore

from benchmarks import peers
from benchmarks.collective_contenders import GLOO, ORDINARY, Race, run_race
from benchmarks.collectives import rounded_sizes
from benchmarks.machine import describe
from benchmarks.options import DEMO, OPERATIONS, STEP
from benchmarks.result import Column, Figures, Result, fixed, size_words, time_words
from benchmarks.timing import Ratio, Series, compare, slowest
from benchmarks.training_rank import Trial, run_trial
from benchmarks.world import RankContext, bar, run_world
from gradwire.cli.demo.compare import measure
from gradwire.cli.demo.model import DemoJob
from gradwire.groups import SharedMemoryGroup

OURS, THEIRS = "gradwire", "gloo"
_IDLE_LIMIT, _BUSY_LIMIT = 1.1, 1.25
_TURN = 0.1
"""Seconds of a contender's turn, if a call is shorter."""
_OTHERS = 0.1
"""Cores that other programs used before the ranks started, from which figures are called unreliable."""
_FAST_LINK = 1e6
"""Mbit/s of the demo's simulated link, which is not measured here."""

Pair = tuple[tuple[float, ...], tuple[float, ...]]
"""Seconds in each round: ours, and gloo's."""


@dataclass(frozen=True, slots=True)
class Course:
    """What ranks measure: a row for each collective at each size, the training step and the demo."""

    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    folder: str


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    machine, figures, lines = describe(), [], []
    for ranks in args.ranks:
        for busy in args.busy:
            others = cores_in_use()
            with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder, busy_processes(busy):
                course = Course(tuple(args.parts), tuple(args.sizes), args.rounds, folder)
                with bar(console, f"{ranks} ranks, {busy} busy processes", len(course.parts), "parts") as on_report:
                    times: list[Mapping[str, Pair]] = run_world(
                        functools.partial(run_course, course),
                        ranks,
                        name="oversubscribed",
                        timeout=args.timeout,
                        on_report=functools.partial(_show, on_report),
                    )
            one, text = figures_of(times, ranks, busy, others)
            figures.append(one)
            lines.append(text)
    settings = {
        "measured": f"{args.rounds} interleaved rounds; a turn is as many calls in a row as take {_TURN * 1e3:.0f} ms, at least "
        "one, after an untimed call; the slowest rank counts",
        "memory": "ordinary tensors, float32, one thread per rank",
        STEP: "a transformer of 10 million elements, batch 1 x 16 tokens: gradwire's DDP, and torch's over gloo",
        DEMO: "the comparison of `gradwire demo`: medians of its 40 steps",
    }
    return Result("oversubscribed", machine, settings, figures, lines)


def _show(on_report: Callable[[int], object], done: int) -> None:
    """Zeros say only that a rank is alive."""
    if done:
        on_report(done)


def cores_in_use(seconds: float = 1.0, stat: Path = Path("/proc/stat")) -> float:
    """How many cores are in use now, on average over so many seconds; 0 where that cannot be seen."""
    if not stat.exists():
        return 0.0
    before = _idle(stat)
    time.sleep(seconds)
    idle = (_idle(stat) - before) / os.sysconf("SC_CLK_TCK") / seconds
    return max(0.0, (os.cpu_count() or 1) - idle)


def _idle(stat: Path) -> int:
    """Clock ticks that cores have been idle, or waiting for a disk."""
    _, _, _, _, idle, waiting, _ = stat.read_text().split(maxsplit=6)
    return int(idle) + int(waiting)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute all the time."""
    started = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def run_course(course: Course, context: RankContext) -> dict[str, Pair]:
    """Measure on this rank, together with all others."""
    found: dict[str, Pair] = {}
    for number, part in enumerate(course.parts, 1):
        place = replace(context, store=PrefixStore(part, context.store), report=lambda _: context.report(0))
        if part in OPERATIONS:
            sizes = rounded_sizes(course.sizes, part, [context.size])
            laps = run_race(Race(part, sizes, course.rounds, _TURN, (ORDINARY, GLOO)), place)
            for nbytes in sizes:
                found[f"{part}, {size_words(nbytes)}"] = laps.seconds[ORDINARY, nbytes], laps.seconds[GLOO, nbytes]
        elif part == STEP:
            names = (peers.TORCH, peers.OURS)
            seconds = run_trial(
                Trial("10m", 1, 16, course.rounds, 2, names, without_communication=False), place
            ).seconds
            found[part] = seconds[peers.OURS], seconds[peers.TORCH]
        else:
            found[part] = _demo(course.folder, place)
        context.report(number if context.rank == 0 else 0)
    return found


def _demo(folder: str, context: RankContext) -> Pair:
    job = DemoJob(size="small", steps=1, batch_size=16, seed=0)
    group = SharedMemoryGroup(context.store, context.rank, context.size, timeout=context.timeout, name="demo")
    try:
        (theirs, ours, *_), _ = measure(job, _FAST_LINK, f"{folder}/store", group)
        context.barrier.wait()  # no rank closes while another is still working
    finally:
        group.close()
    return (ours,), (theirs,)


def figures_of(times: Sequence[Mapping[str, Pair]], ranks: int, busy: int, others: float) -> tuple[Figures, str]:
    """A row for each part: both times, and the ratio; and what is above its limit, in words."""
    limit = _BUSY_LIMIT if busy else _IDLE_LIMIT
    rows: dict[str, dict[str, Series | Ratio]] = {}
    above = []
    for name in times[0]:
        ours, theirs = (slowest(who, [rank[name][i] for rank in times]) for i, who in enumerate((OURS, THEIRS)))
        ratio = compare(ours, theirs)
        rows[name] = {OURS: ours, THEIRS: theirs, "ratio": ratio}
        if ratio.of_medians > (1.0 if name == DEMO else limit):
            above.append(f"{name} ({ratio.of_medians:.2f})")
    title = f"{ranks} ranks, {busy} busy processes"
    words = f"{title}: {len(rows) - len(above)} of {len(rows)} take at most {limit:g} x gloo's time, the demo 1 x"
    words += f"; not {', '.join(above)}." if above else "."
    if others > _OTHERS:
        words += f" The machine was busy otherwise ({others:.1f} cores in use before): repeat this on an idle one."
    columns = [Column(OURS, OURS, time_words), Column(THEIRS, THEIRS, time_words), Column("ratio", "ratio", fixed(2))]
    caption = "Median, and quartiles below it. Ratio: ours to gloo's; of medians, and below it the median over rounds."
    return Figures(rows, columns, caption, title=title, first="operation"), words

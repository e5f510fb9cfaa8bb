"""`faults`: kills members of an elastic run at random places, and its hub, and compares what those that are left have trained.

Ranks kill themselves, by SIGKILL, where `gradwire.testing.faults.Chaos` draws it from the seed. Every member writes a line for each
step that it has committed, with a digest of its parameters and the samples that its averages count. So it is seen afterwards that
all members had the same bits after each step, that each step was committed, once by each member, that each sample counted once, and
how long after a fault the next step was. Before, `DistributedDataParallel` trains the same without faults, for the goodput.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.faults_plot import History, draw, measured_on
from benchmarks.faults_rank import BATCH
from benchmarks.faults_run import CommitLine, FaultsRun, Launch, check, launch, left_over
from benchmarks.machine import describe
from benchmarks.plot import check_plot
from benchmarks.result import Column, Figures, Result, fixed, time_words
from benchmarks.timing import Series
from benchmarks.world import bar
from gradwire.errors import GroupError, UsageError
from gradwire.testing.faults import PLACES

IN_A_STEP = {"forward": 4e-3, "bucket in flight": 2e-3, "vote": 4e-3, "optimizer": 4e-3}
IN_A_CHANGE = {"view change": 8e-3, "join": 0.05, "hub write": 8e-3}
"""Probability of a fault at each visit. Only changes of members visit the places of the second one, and each fault there leads to
more of them. With 8 members and slots all places have their `SHARE`."""
SHARE = 0.05
"""Of all faults, at least so many at each place."""
_HUB_EVERY = 50
"""After how many faults the hub is killed."""
_MANY = 1000
"""Of so many faults a place has its share, or is not reached as it should be."""
_PLAIN_STEPS = 200


def run(args: argparse.Namespace, console: Console, start: Launch = launch) -> Result:
    """Measure."""
    check_plot("--plot", args.plot)
    if BATCH % args.slots or args.ranks > BATCH:
        raise UsageError(
            f"--slots {args.slots}: a step has {BATCH} samples. Choose a divisor, and at most as many ranks."
        )
    if args.peer:
        from benchmarks import faults_peers

        return faults_peers.run(args, console)
    machine, plain = describe(), None
    with tempfile.TemporaryDirectory(prefix="gradwire-faults-") as name:
        options = {"seed": args.seed, "slots": args.slots, "width": args.width, "least": 2}
        if args.plain:
            folder = Path(name, "plain")
            folder.mkdir()
            plain = train_plain(folder, args, options, start)
        folder = Path(name, "faults")
        folder.mkdir()
        options["rate"] = {**{place: rate * args.rate for place, rate in IN_A_STEP.items()}, **IN_A_CHANGE}
        training, hubs = train(folder, args, options, console, start)
        commits, faults, rest = training.commits, training.read("faults"), left_over(folder)
    if args.plot is not None:
        title = f"{args.ranks} ranks that die at random places, seed {args.seed}; the hub was killed {hubs} times"
        draw(args.plot, [history(commits, faults)], title=title, footer=measured_on(machine), pace=plain)
    return result(machine, args, commits, faults, hubs, plain=plain, rest=rest)


def train_plain(folder: Path, args: argparse.Namespace, options: dict[str, Any], start: Launch) -> float:
    """Steps per second of `DistributedDataParallel`, without the first ones."""
    with FaultsRun(folder, {**options, "plain": _PLAIN_STEPS}, ranks=args.ranks, start=start) as training:
        if training.launcher.wait(args.timeout):
            raise GroupError(f"training without faults failed. Its output:\n{training.said()}")
    times = json.loads((folder / "plain").read_text())[_PLAIN_STEPS // 10 :]
    return (len(times) - 1) / float(times[-1] - times[0])


def train(
    folder: Path, args: argparse.Namespace, options: dict[str, Any], console: Console, start: Launch
) -> tuple[FaultsRun, int]:
    """Train under faults until enough of them have fired. Also returns how many times the hub was killed."""
    hubs, deadline = 0, time.monotonic() + args.timeout
    with (
        FaultsRun(folder, options, ranks=args.ranks, start=start) as training,
        bar(console, "training", args.faults, "faults") as show,
    ):
        for seen in range(1, args.faults + 1):
            left = min(120.0, deadline - time.monotonic())
            training.wait(lambda seen=seen: len(counted(training)) >= seen, f"fault {seen}", left)  # type: ignore[misc]
            show(seen)
            if seen // _HUB_EVERY > hubs:
                hubs += 1
                os.kill(training.hub(), signal.SIGKILL)
        training.launcher.terminate()
        if (code := training.launcher.wait(120.0)) not in (0, 128 + signal.SIGTERM):
            raise GroupError(f"training under faults: exit code {code}. Its output:\n{training.said()}")
    return training, hubs


def history(commits: list[CommitLine], faults: list[Any]) -> History:
    """All of it, for the picture."""
    begin, end = (pick(line.time for line in commits) for pick in (min, max))
    times = [fault["time"] - begin for fault in faults if begin <= fault["time"] <= end]
    return History("gw.elastic", end - begin, [(line.time - begin, line.step, line.members) for line in commits], times)


def counted(training: FaultsRun) -> list[Any]:
    """The faults since which members have changed and committed a step."""
    last = training.last()
    return [fault for fault in training.read("faults") if last is not None and fault["epoch"] < last.epoch]


def result(
    machine: dict[str, str],
    args: argparse.Namespace,
    commits: list[CommitLine],
    faults: list[Any],
    hubs: int,
    *,
    plain: float | None = None,
    rest: list[str] | None = None,
) -> Result:
    """What the lines of all members show."""
    record, times = check(commits), sorted(line.time for line in commits)
    last_epoch = max(line.epoch for line in commits)
    waits: dict[str, list[float]] = {place: [] for place in PLACES}
    changed = [fault for fault in faults if fault["epoch"] < last_epoch]
    for fault in changed:
        later = next((at for at in times if at > fault["time"]), None)
        if later is not None:
            waits[fault["place"]].append(later - fault["time"])
    every = [wait for place in waits.values() for wait in place]
    rows: dict[str, dict[str, Any]] = {
        place: {"number": len(found), "wait": Series(place, tuple(found)), "p99": quantile(found)}
        for place, found in {**waits, "all": every}.items()
        if found
    }
    first: dict[int, float] = defaultdict(lambda: float("inf"))
    for line in commits:
        first[line.step] = min(first[line.step], line.time)
    goodput = (len(first) - 1) / max(max(first.values()) - min(first.values()), 1e-9)
    rows["all"] |= {"steps": goodput, "plain": plain, "goodput": plain and goodput / plain}
    columns = [
        Column("number", "faults"),
        Column("wait", "to commit", time_words),
        Column("p99", "99 %", time_words),
        Column("steps", "steps/s", fixed(1)),
        Column("plain", "of DDP", fixed(1)),
        Column("goodput", "goodput", fixed(2)),
    ]
    rare = [place for place in PLACES if len(waits[place]) < SHARE * args.faults]
    processes = len({line.member for line in commits})
    lines = [
        f"{record.steps} steps by {processes} processes, {last_epoch} changes of members, the hub killed {hubs} times.",
        f"Steps after which members had different parameters: {record.differ}. Members that skipped or repeated a step: "
        f"{record.gaps}. Steps that nobody committed: {record.missing}. Steps and epochs in which a sample did not count once: "
        f"{record.samples}. Left over: {', '.join(rest or ['nothing'])}.",
        f"Places with less than 1 of {1 / SHARE:.0f} faults: {', '.join(rare) or 'none'}.",
    ]
    settings = {
        "members": f"{args.ranks}, seed {args.seed}",
        "faults": f"{len(faults)} SIGKILL, {len(changed)} counted",
    }
    caption = (
        "A fault counts if members have changed since. To commit: from a fault to the next commit of anybody; median, quartiles "
        "below it, and within what 99 of 100 are. Of DDP: steps/s without faults, and goodput relative to it."
    )
    error = GroupError(lines[1]) if rest or not record.faultless else None
    if rare and args.faults >= _MANY:
        error = error or GroupError(lines[2])
    return Result("faults", machine, settings, [Figures(rows, columns, caption, first="place")], lines, error)


def quantile(waits: list[float]) -> float:
    """That within which 99 of 100 are."""
    return statistics.quantiles(waits, n=100, method="inclusive")[-1] if len(waits) > 1 else waits[0]

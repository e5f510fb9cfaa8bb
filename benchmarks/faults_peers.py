"""`faults --peer …`: an elastic run, and what else survives the death of a rank, under the same kills.

A Poisson process drawn from the seed decides when which rank is killed, by SIGKILL from here; it is the same for all contenders. If
the rank in this place is not running yet, the next one that is dies. Before and after each contender the same model is trained
without faults by gradwire's DistributedDataParallel over shared memory, and goodput is relative to the mean of these two. At the
begin and the end it is trained by torch's over gloo, too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.faults import quantile
from benchmarks.faults_contenders import Contender, Launched, Processes, TorchFT, torchft_version
from benchmarks.faults_peer_rank import GLOBAL_BATCH
from benchmarks.faults_plot import History, draw, measured_on
from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, fixed, time_words
from benchmarks.timing import Series
from benchmarks.world import bar
from gradwire.errors import GroupError
from gradwire.launch.chaos_schedule import ChaosSchedule

OURS, RESTART = "gw.elastic", "restart"
PEERS: Mapping[str, float | None] = {"torchft": None, "torchft-1s": 1.0}
"""torchft's: the heartbeat timeout of the lighthouse in seconds, where it is not the default."""
BASES = {"ddp": "gradwire's DDP", "torch-ddp": "torch's DDP"}
_LOOK = 0.02
_START = 180.0
_BASE = 10.0
"""Seconds for which each reference is measured, each time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the processes of a contender wrote; times are since the window's begin."""

    history: History
    tried: Sequence[Any]
    """Lines of `faults_peer_rank.py`, of the window."""
    born: Mapping[int, float]
    """When each process started."""
    load: float
    """Of the machine, when the window ended."""

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.history.progress[-1][1] / self.history.seconds


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    machine, lines = describe(), list[str]()
    options = {"ranks": args.ranks, "width": args.width, "slots": args.slots, "checkpoint": 0}
    python = args.python or sys.executable
    found, bases = dict[str, Trial](), dict[str, list[float]]({way: [] for way in BASES})
    relative = dict[str, int]()
    for name in [OURS, *args.peer]:
        if name in PEERS:
            version, reason = torchft_version(python)
            lines.append(f"{name}: {version}" if version else f"{name} is skipped: {reason}")
            if not version:
                continue
        start = functools.partial(started, name, args, options, python)
        for way in BASES if not found else ["ddp"]:
            measure_base(way, args, options, bases, console)
        relative[name] = len(bases["ddp"]) - 1
        try:
            found[name] = trial(name, start, args, console, kills=True)
        except GroupError as error:
            if name == OURS:
                raise
            lines.append(f"{name} is skipped: {error} {' '.join(getattr(error, '__notes__', []))[-500:]}")
    for way in BASES:
        measure_base(way, args, options, bases, console)
    rows, torchs = {}, statistics.mean(bases["torch-ddp"])
    for name, one in found.items():
        at = relative[name]
        rows[name] = row_of(one, {"ddp": statistics.mean(bases["ddp"][at : at + 2]), "torch-ddp": torchs})
    if args.plot is not None:
        title = f"{args.ranks} ranks, one killed every {args.interval:g} s in the mean, seed {args.seed}"
        pace = statistics.median(bases["ddp"])
        draw(args.plot, [one.history for one in found.values()], title=title, footer=measured_on(machine), pace=pace)
    lines += [f"{BASES[way]}: {_words(rates)} steps per second without faults." for way, rates in bases.items()]
    return result(machine, args, rows, lines)


def started(name: str, args: argparse.Namespace, options: dict[str, Any], python: str, folder: Path) -> Contender:
    """Start this contender."""
    if name == OURS:
        return Launched(folder, "elastic", options, "--elastic", f"1:{args.ranks}")
    if name == RESTART:
        return Launched(folder, "ddp", {**options, "checkpoint": args.checkpoint}, again=True)
    return TorchFT(folder, options, python, PEERS[name])


def _words(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.1f}" for rate in rates)


def measure_base(
    way: str, args: argparse.Namespace, options: dict[str, Any], bases: dict[str, list[float]], console: Console
) -> None:
    """Steps per second of a reference, once more."""
    start = functools.partial(Launched, way=way, options=options)
    one = trial(BASES[way], start, args, console, kills=False)
    if not one.rate:
        raise GroupError(f"{BASES[way]}: no step was committed within {one.history.seconds:g} s.")
    bases[way].append(one.rate)


def trial(
    name: str, start: Callable[[Path], Contender], args: argparse.Namespace, console: Console, *, kills: bool
) -> Trial:
    """Train for the window's length, from when all ranks have committed a step together."""
    seconds = args.duration if kills else min(_BASE, args.duration)
    with tempfile.TemporaryDirectory(prefix="gradwire-faults-") as folder_name:
        folder = Path(folder_name)
        contender, processes = start(folder), Processes(folder)
        try:
            with bar(console, name, round(seconds), "seconds") as show:
                _wait_for_all(contender, folder, args.ranks)
                schedule = ChaosSchedule({"kill": 1 / args.interval}, args.seed) if kills else None
                begin, faults, shown = time.monotonic(), list[float](), 0
                while (now := time.monotonic() - begin) < seconds:
                    contender.tend()
                    processes.look()
                    for _, which in schedule.due(now) if schedule is not None else ():
                        alive, holders = processes.alive, None if contender.durable else processes.trained
                        if (place := victim(alive, int(which * args.ranks), holders)) is not None:
                            faults.append(time.monotonic() - begin)
                            processes.kill(place)
                    if int(now) != shown:
                        show(shown := int(now))
                    time.sleep(_LOOK)
            load = os.getloadavg()[0]
        finally:
            processes.close()
            contender.close()
        tried = [[at - begin, *rest] for at, *rest in read(folder / "steps") if 0 <= at - begin <= seconds]
        born = {pid: at - begin for at, _, pid in read(folder / "started")}
    commits = [(at, step, members) for at, _, step, committed, members, *_ in tried if committed]
    return Trial(History(name, seconds, commits, faults), tried, born, load)


def read(path: Path) -> list[Any]:
    """The lines of a file that others append to."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _wait_for_all(contender: Contender, folder: Path, ranks: int) -> None:
    """Until a step was committed by all ranks together."""
    deadline = time.monotonic() + _START
    while not any(committed and members == ranks for _, _, _, committed, members, *_ in read(folder / "steps")[-100:]):
        contender.tend()
        time.sleep(0.2)
        if time.monotonic() > deadline:
            raise contender.fail(f"its {ranks} ranks have committed no step within {_START:.0f} s")


def victim(alive: Sequence[int], place: int, holders: Sequence[int] | None) -> int | None:
    """The place of the rank that is killed, but not that of the last one that has the state; None for a state in a file.

    >>> (
    ...     victim([0, 1, 3], 2, [0, 3]),
    ...     victim([0, 1], 3, [0, 1]),
    ...     victim([0, 1], 0, [0]),
    ...     victim([0], 0, [0]),
    ...     victim([0], 1, None),
    ... )
    (3, 0, 1, None, 0)
    """
    chosen = sorted(alive, key=lambda one: (one < place, one))
    return next((one for one in chosen if holders is None or {*holders} - {one}), None)


def row_of(one: Trial, bases: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a contender, relative to the steps per second of the references."""
    progress = one.history.progress
    waits = []
    for fault in one.history.faults:
        following = (at for at, _ in progress if at > fault)
        waits.append(next(following, one.history.seconds) - fault)
    again, differ, skipped, retried = faults_in(one)
    samples: dict[int, int] = {}
    for _, _, step, committed, _, number, _ in one.tried:
        if committed:
            samples[step] = max(number, samples.get(step, 0))
    full = max(samples.values(), default=1)
    return {
        "faults": len(waits),
        "steps": progress[-1][1],
        "goodput": one.rate / bases["ddp"],
        "of torch": one.rate / bases["torch-ddp"],
        "samples": sum(samples.values()) / full / one.history.seconds / bases["ddp"],
        "wait": Series("wait", tuple(waits)) if waits else None,
        "p99": quantile(waits) if waits else None,
        "repeated": len(again),
        "retried": len(retried),
        "skipped": len(skipped),
        "differ": len(differ),
        "load": one.load,
        "kills": one.history.faults,
    }


def faults_in(one: Trial) -> tuple[set[int], set[int], set[tuple[int, int]], set[int]]:
    """Steps that were committed, lost, and computed again by new processes; after which parameters differed; that a process did not
    commit, with its number, though it did others before and after; and that were computed and dropped by all members or some."""
    first: dict[int, tuple[float, str]] = {}
    steps: dict[int, list[int]] = {}
    again, differ, retried = set[int](), set[int](), set[int]()
    for at, pid, step, committed, _, _, digest in sorted(one.tried):
        if not committed:
            retried.add(step)
            continue
        begin, bits = first.setdefault(step, (at, digest))
        if one.born[pid] > begin:
            again.add(step)
        elif bits != digest:
            differ.add(step)
        steps.setdefault(pid, []).append(step)
    skipped = {(pid, step) for pid, mine in steps.items() for step in set(range(mine[0], mine[-1])) - {*mine}}
    return again, differ, skipped, retried


def result(machine: Mapping[str, str], args: argparse.Namespace, rows: dict[str, Any], lines: list[str]) -> Result:
    """The table."""
    columns = [
        Column("faults", "kills"),
        Column("goodput", "goodput", fixed(2), below="of torch", show_below=fixed(2)),
        Column("samples", "samples", fixed(2)),
        Column("wait", "to commit", time_words),
        Column("p99", "99 %", time_words),
        Column("repeated", "redone"),
        Column("retried", "again"),
    ]
    caption = (
        f"Goodput: steps committed per second relative to {BASES['ddp']} without faults, and below it to {BASES['torch-ddp']}. "
        "Samples: the same for samples of committed steps. To commit: from a kill to the commit of a step that nobody had "
        "committed; median, quartiles below it, and within what 99 of 100 are. Redone: steps committed, then lost, and computed "
        "again. Again: steps that a rank computed and dropped at least once."
    )
    lines += [
        f"{name}: after {row['differ']} steps ranks had different parameters, and {row['skipped']} times a rank missed a step and "
        f"copied its result later. The load of the machine was {row['load']:.1f}."
        for name, row in rows.items()
    ]
    settings = {
        "kills": f"SIGKILL, one in {args.interval:g} s in the mean, for {args.duration:g} s, seed {args.seed}",
        "model": f"width {args.width}, AdamW, {GLOBAL_BATCH} samples a step, {args.ranks} ranks, one thread each",
        "restart": f"gradwire run of gradwire's DDP again, from a checkpoint every {args.checkpoint:g} s",
    }
    ours = rows.get(OURS, {})
    wrong = {name: ours[name] for name in ("repeated", "skipped", "differ") if ours.get(name)}
    error = GroupError(f"{OURS}: steps of each kind that must not be: {json.dumps(wrong)}") if wrong else None
    return Result("faults", machine, settings, [Figures(rows, columns, caption, first="contender")], lines, error)

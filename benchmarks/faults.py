"""`faults`: kills members of an elastic run at random places, and its hub, and compares what those that are left have trained.

Ranks kill themselves, by SIGKILL, where `gradwire.testing.faults.Chaos` draws it from the seed. Every member writes a line for each
step that it has committed, with a digest of its parameters. So it is seen afterwards that all members had the same bits after each
step, that each step was committed, once by each member, and how long after a fault the next step was.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import describe
from benchmarks.result import Column, Figures, Result, time_words
from benchmarks.timing import Series
from benchmarks.world import bar
from gradwire.errors import GroupError

IN_A_STEP = {"forward": 2e-4, "bucket in flight": 5e-4, "vote": 5e-4, "optimizer": 5e-4}
IN_A_CHANGE = {"view change": 0.02, "join": 0.1, "hub write": 0.02}
"""Probability of a fault at each visit. Only changes of members visit the places of the second one."""
_HUB = re.compile(r"\(process (\d+)\)")
_LOOK = 0.05
_HUB_EVERY = 50
"""After how many faults the hub is killed."""


def run(args: argparse.Namespace, console: Console) -> Result:
    """Measure."""
    machine = describe()
    with tempfile.TemporaryDirectory(prefix="gradwire-faults-") as name:
        folder = Path(name)
        options = {"seed": args.seed, "slots": args.slots, "width": args.width}
        options["rate"] = {**{place: rate * args.rate for place, rate in IN_A_STEP.items()}, **IN_A_CHANGE}
        hubs = train(folder, args, options, console)
        commits, faults = read(folder / "commits"), read(folder / "faults")
    return result(machine, args, commits, faults, hubs)


def train(folder: Path, args: argparse.Namespace, options: dict[str, Any], console: Console) -> int:
    """Train under faults until enough of them have fired. Returns how many times the hub was killed."""
    script = Path(__file__).with_name("faults_rank.py")
    command = [sys.executable, "-m", "gradwire", "run", "--no-record", "--nproc", str(args.ranks)]
    command += ["--elastic", f"1:{args.ranks}", str(script), str(folder), json.dumps(options)]
    hubs, screen, deadline = 0, folder / "screen", time.monotonic() + args.timeout
    with screen.open("w") as out, bar(console, "training", args.faults, "faults") as show:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        seen, before = 0, time.monotonic()
        try:
            while seen < args.faults:
                time.sleep(_LOOK)
                fired = (folder / "faults").read_bytes().count(b"\n") if (folder / "faults").exists() else 0
                if fired != seen:
                    seen, before = fired, time.monotonic()
                    show(min(fired, args.faults))
                if fired // _HUB_EVERY > hubs and (found := _HUB.findall(screen.read_text())):
                    hubs += 1
                    os.kill(int(found[-1]), signal.SIGKILL)
                if launcher.poll() is not None or time.monotonic() > min(deadline, before + 120.0):
                    last = "\n".join(screen.read_text().splitlines()[-20:])
                    raise GroupError(
                        f"training under faults: it has ended, or hangs, after {seen} faults. Its output:\n{last}"
                    )
            time.sleep(args.settle)
            launcher.terminate()
            launcher.wait(60.0)
        finally:
            launcher.kill()
            launcher.wait()
    return hubs


def read(path: Path) -> list[Any]:
    """The lines of a file that others append to."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def result(
    machine: dict[str, str], args: argparse.Namespace, commits: list[Any], faults: list[Any], hubs: int
) -> Result:
    """What the lines of all members show."""
    times = sorted(at for at, *_ in commits)
    last_epoch = max(epoch for _, _, _, epoch, *_ in commits)
    digests: dict[int, set[str]] = defaultdict(set)
    steps: dict[str, list[int]] = defaultdict(list)
    for _, member, step, _, digest, _ in commits:
        digests[step].add(digest)
        steps[member].append(step)
    differ = sum(len(found) > 1 for found in digests.values())
    gaps = sum(mine != list(range(mine[0], mine[-1] + 1)) for mine in steps.values())
    missing = len(set(range(max(digests) + 1)) - digests.keys())
    waits: dict[str, list[float]] = defaultdict(list)
    counted = [fault for fault in faults if fault["epoch"] < last_epoch]
    for fault in counted:
        later = next((at for at in times if at > fault["time"]), None)
        if later is not None:
            waits[fault["place"]].append(later - fault["time"])
    every = [wait for place in waits.values() for wait in place]
    rows: dict[str, dict[str, Any]] = {
        place: {"number": len(found), "wait": Series(place, tuple(found)), "p99": quantile(found)}
        for place, found in {**waits, "all": every}.items()
    }
    columns = [
        Column("number", "faults"),
        Column("wait", "to the next commit", time_words),
        Column("p99", "99 of 100 within", time_words),
    ]
    lines = [
        f"{len(digests)} steps by {len(steps)} processes, {last_epoch} changes of members, the hub killed {hubs} times.",
        f"Steps after which members had different parameters: {differ}. Members that skipped or repeated a step: {gaps}. "
        f"Steps that nobody committed: {missing}.",
    ]
    settings = {
        "members": f"{args.ranks}, seed {args.seed}",
        "faults": f"{len(faults)} SIGKILL, {len(counted)} counted",
    }
    caption = "A fault counts if members have changed since. Median, and quartiles below it."
    error = GroupError(lines[1]) if differ or gaps or missing else None
    return Result("faults", machine, settings, [Figures(rows, columns, caption, first="place")], lines, error)


def quantile(waits: list[float]) -> float:
    """That within which 99 of 100 are."""
    return statistics.quantiles(waits, n=100, method="inclusive")[-1] if len(waits) > 1 else waits[0]

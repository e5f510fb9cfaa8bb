"""`overhead --against PATH`: steps at world size 1 with this checkout and with another one, whose processes take turns.

Each checkout runs in processes of its own, several of each one after another: where a process has its memory changes its times by
a percent or more. A round is a turn of this checkout's process and a turn of the other's; the first changes from round to round.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.against_worker import BARE, HOST, OURS, TORCH, VIEWS
from benchmarks.result import Column, Figures, fixed
from benchmarks.timing import Series, compare
from gradwire.errors import CollectiveTimeout, UsageError

HERE = Path(__file__).resolve().parent.parent
_TIMEOUT = 300.0
"""Seconds that a worker may take for an answer; the first includes the import of torch."""
Seconds = Mapping[str, Sequence[float]]
"""Seconds per step by variant, one figure per round."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What the workers train, and how they time it."""

    device: str
    size: str | None
    parameters: int
    batch: int
    block: int
    clock: str

    @property
    def words(self) -> str:
        """The model and its batch."""
        model = f"{self.parameters} parameters of 16 x 16" if self.size is None else f"GPT-2 {self.size}"
        return f"{model}, batch {self.batch}, {self.device}, {self.clock} time, {self.block} steps a turn"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The times of both checkouts."""

    plan: Plan
    new: Seconds
    old: Seconds

    def step(self, side: Seconds, name: str) -> Series:
        """The times of a variant."""
        return Series(name, tuple(side[name]))

    def overhead(self, side: Seconds, name: str) -> Series:
        """What a variant adds to the bare model's step, round by round."""
        return self.step(side, name).minus(self.step(side, BARE + HOST if name.endswith(HOST) else BARE))


def compare_checkouts(plan: Plan, other: Path, *, processes: int, rounds: int, console: Console) -> Comparison:
    """Measure `rounds` rounds in each of `processes` pairs of processes."""
    if not (other / "src" / "gradwire").is_dir():
        raise UsageError(f"overhead --against {other}: there is no src/gradwire. Name the root of a checkout.")
    new: dict[str, list[float]] = {}
    old: dict[str, list[float]] = {}
    with console.status("starting") as status:
        for pair in range(processes):
            with _worker(HERE, plan) as ours, _worker(other.resolve(), plan) as theirs:
                for number in range(rounds):
                    turns = [(ours, new), (theirs, old)]
                    for worker, found in turns if number % 2 == 0 else reversed(turns):
                        for name, seconds in worker.measure().items():
                            found.setdefault(name, []).append(seconds)
                    status.update(f"processes {pair + 1} of {processes}, round {number + 1} of {rounds}")
    return Comparison(plan, new, old)


class _Worker:
    """A process with the gradwire of one checkout."""

    def __init__(self, checkout: Path, process: subprocess.Popen[str]) -> None:
        self._checkout, self._process = checkout, process

    def measure(self) -> dict[str, float]:
        """Seconds per step of each variant."""
        assert self._process.stdin is not None
        self._process.stdin.write("measure\n")
        self._process.stdin.flush()
        found: dict[str, float] = self.read()
        return found

    def read(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _TIMEOUT)[0]:
            raise CollectiveTimeout(
                f"overhead --against: the process of {self._checkout} has not answered in {_TIMEOUT} s."
            )
        line = self._process.stdout.readline()
        if not line:
            raise UsageError(f"overhead --against: the process of {self._checkout} ended with {self._process.wait()}.")
        return json.loads(line)


@contextmanager
def _worker(checkout: Path, plan: Plan) -> Iterator[_Worker]:
    environ = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{HERE}", "ONEDNN_JIT_PROFILE": "0"}
    command = [sys.executable, "-P", "-m", "benchmarks.against_worker", json.dumps(asdict(plan))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environ, cwd="/") as process:
        try:
            worker = _Worker(checkout, process)
            found = Path(worker.read()["gradwire"]).resolve()
            if not found.is_relative_to(checkout):
                raise UsageError(f"overhead --against: the process of {checkout} imported {found}.")
            yield worker
        finally:
            process.kill()


def figures_of(comparison: Comparison) -> Figures:
    """A row for each variant: both sides, and the ratio old/new of steps and of what they add to the bare step."""
    rows: dict[str, dict[str, Any]] = {}
    for name in comparison.new:
        old, new = comparison.step(comparison.old, name), comparison.step(comparison.new, name)
        rows[name] = {"old": old, "new": new, "ratio": _spread(old, new), "old_ms": old.median, "new_ms": new.median}
        if not name.startswith(BARE):
            old, new = (comparison.overhead(side, name) for side in (comparison.old, comparison.new))
            rows[name] |= {"old_added": old.median, "new_added": new.median, "ratio_added": _spread(old, new)}
    ms, plain = fixed(2, 1e3), fixed(2)
    columns = (
        Column("old_ms", "old", ms),
        Column("new_ms", "new", ms),
        Column("ratio", "old/new", plain),
        Column("old_added", "added\nold", ms),
        Column("new_added", "added\nnew", ms),
        Column("ratio_added", "added\nold/new", plain),
    )
    caption = (
        "ms per step: medians; old/new per round: median, and quartiles below it. Above 1 the new one is faster. Added: over the "
        "bare model of the same process."
    )
    return Figures(rows, columns, caption, title=comparison.plan.words)


def _spread(old: Series, new: Series) -> Series:
    """The ratios of single rounds."""
    pairs = zip(old.seconds, new.seconds, strict=True)
    return Series("old/new", tuple(a / b if b > 0 else float("nan") for a, b in pairs))


def lines_of(comparison: Comparison) -> list[str]:
    """What the figures mean, as sentences."""
    lines = []
    for name in (OURS, OURS + VIEWS, OURS + HOST, OURS + VIEWS + HOST):
        if name not in comparison.new:
            continue
        kind = ("the host time of a step" if HOST in name else "a step") + (", bucket views" if VIEWS in name else "")
        step = compare(comparison.step(comparison.new, name), comparison.step(comparison.old, name)).median_of_rounds
        ours, before, torchs = (
            comparison.overhead(side, variant).median
            for side, variant in (
                (comparison.new, name),
                (comparison.old, name),
                (comparison.new, name.replace(OURS, TORCH)),
            )
        )
        line = f"{comparison.plan.words}: {kind}: new/old {step:.3f}"
        if min(before, torchs) > 0:
            line += (
                f"; added to the bare model: {ours / before:.3f} of the old, {ours / torchs:.3f} of torch's (medians)"
            )
        lines.append(line + ".")
    return lines

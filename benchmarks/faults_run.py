"""`FaultsRun`: an elastic run of `faults_rank.py`, what its members have written, and whether any of it is wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from benchmarks import faults_rank
from benchmarks.faults_rank import BATCH, SAMPLES
from gradwire.errors import GroupError

_HUB = re.compile(r"hub .*?([\d.:]*) \(process (\d+)\)")
_LOOK = 0.02
_RUN = "GRADWIRE_FAULTS_RUN"
"""The variable by which processes of a run are found."""


class CommitLine(NamedTuple):
    """A step that a member has committed."""

    time: float
    member: str
    step: int
    epoch: int
    digest: str
    members: int
    samples: str


class Launcher(Protocol):
    """The process of `gradwire run`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[Sequence[str], Path, dict[str, str]], Launcher]
"""Starts `gradwire run` with these arguments, its output in this file, and these variables."""


def launch(words: Sequence[str], screen: Path, env: dict[str, str]) -> Launcher:
    """As a user does."""
    with screen.open("w") as out:
        command, environ = [sys.executable, "-m", "gradwire", "run", *words], {**os.environ, **env}
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ)


class FaultsRun:
    """A run that is ended when the block ends."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        *words: str,
        ranks: int,
        start: Launch = launch,
        least: int = 1,
        most: int | None = None,
    ) -> None:
        """`words` are options of `gradwire run`, and `most` is the largest number of ranks, by default `ranks`."""
        self.folder, self.ranks = folder, ranks
        script = [
            faults_rank.__file__,
            str(folder),
            json.dumps({"width": 16, "slots": 8, "seed": 0, "least": 1, **options}),
        ]
        elastic = [] if options.get("plain") else ["--elastic", f"{least}:{most or ranks}"]
        (folder / "tmp").mkdir(exist_ok=True)
        env = {_RUN: str(folder), "TMPDIR": str(folder / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")}

        def launch(ranks: int, *words: str) -> None:
            words = ("--no-record", "--nproc", str(ranks), *words, *script)
            self._launchers.append(start(words, folder / f"screen{len(self._launchers)}", env))

        self._launch = launch
        self._launchers: list[Launcher] = []
        self._lines: dict[str, tuple[int, list[Any]]] = {}
        launch(ranks, *elastic, *words)

    @property
    def launcher(self) -> Launcher:
        """That which has begun the run."""
        return self._launchers[0]

    def join(self, ranks: int, key: str) -> None:
        """Let so many more ranks join, of a launcher of their own. The key is in this file."""
        self._launch(ranks, "--join", _HUB.findall(self.said())[0][0], "--key-file", key)

    def said(self, lines: int = 0) -> str:
        """What the launchers have written, or the last lines of each."""
        screens = (self.folder / f"screen{number}" for number in range(len(self._launchers)))
        return "\n".join("\n".join(screen.read_text().splitlines()[-lines:]) for screen in screens)

    def __enter__(self) -> FaultsRun:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()

    def read(self, name: str) -> list[Any]:
        """The lines of a file that members append to."""
        at, lines = self._lines.get(name, (0, []))
        if (path := self.folder / name).exists():
            with path.open("rb") as file:
                file.seek(at)
                whole, newline, _ = file.read().rpartition(b"\n")
            lines += map(json.loads, whole.splitlines())
            self._lines[name] = at + len(whole) + len(newline), lines
        return lines

    @property
    def commits(self) -> list[CommitLine]:
        return [CommitLine(*line) for line in self.read("commits")]

    def last(self) -> CommitLine | None:
        lines = self.read("commits")
        return CommitLine(*lines[-1]) if lines else None

    @property
    def pids(self) -> dict[str, int]:
        """The processes that were ever members."""
        return {member: pid for _, member, pid in self.read("members")}

    def members(self) -> list[str]:
        """Those of the view of the last commit that have committed in it."""
        lines = self.commits
        return sorted({line.member for line in lines if line.epoch == lines[-1].epoch})

    def hub(self) -> int:
        """The process of the hub."""
        return int(_HUB.findall(self.said())[-1][1])

    def wait(self, condition: Callable[[], Any], what: str, limit: float = 120.0) -> Any:
        """Wait until it holds, and return its value. The limit only ends a hang."""
        deadline = time.monotonic() + limit
        while not (value := condition()):
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                ended = "hangs" if self.launcher.poll() is None else "has ended"
                raise GroupError(
                    f"training under faults: it {ended}; {what} was expected. Its output:\n{self.said(20)}"
                )
            time.sleep(_LOOK)
        return value

    def wait_for_members(self, number: int, *, since: float = 0.0) -> float:
        """Wait until a view of so many has committed a step on all of them after this time; when the first one had."""

        def first() -> float:
            lines = [line for line in self.commits if line.time > since]
            if not lines or lines[-1].members != number:
                return 0.0
            view = [line for line in lines if line.epoch == lines[-1].epoch]
            return view[0].time if len({line.member for line in view}) == number else 0.0

        return float(self.wait(first, f"a commit of {number} members"))

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many more steps are committed."""
        line = self.last()
        step = number + (-1 if line is None else line.step)
        self.wait(lambda: (line := self.last()) is not None and line.step >= step, f"step {step}")

    def end(self, step: int | None = None) -> int:
        """Let training end, after this step or soon; returns the exit code of the launcher."""
        line = self.last()
        new = self.folder / "last.new"
        new.write_text(str(step or (0 if line is None else line.step) + 20))
        new.rename(self.folder / "last")
        return max(launcher.wait(120.0) for launcher in self._launchers)


class Record(NamedTuple):
    """What is wrong with the commits of a run: each should be 0."""

    steps: int
    differ: int
    """Steps after which members had different parameters."""
    gaps: int
    """Members that skipped a step or repeated one."""
    missing: int
    """Steps that nobody committed."""
    samples: int
    """Epochs in which a sample was not counted, or not once."""

    @property
    def faultless(self) -> bool:
        return not any(self[1:])


def check(commits: Sequence[CommitLine]) -> Record:
    """Compare what members wrote."""
    found: dict[int, set[tuple[str, str]]] = defaultdict(set)
    steps: dict[str, list[int]] = defaultdict(list)
    for line in commits:
        found[line.step].add((line.digest, line.samples))
        steps[line.member].append(line.step)
    gaps = sum(mine != list(range(mine[0], mine[-1] + 1)) for mine in steps.values())
    last, batches = max(found, default=-1), SAMPLES // BATCH
    counted: Counter[int] = Counter()
    for step, facts in found.items():
        for _, samples in facts:
            counted[step // batches] |= int(samples or "0", 16)
    sizes = Counter(step // batches for step in found)
    whole = [epoch for epoch, number in sizes.items() if number == batches]
    each = {line.step: int(line.samples or "0", 16).bit_count() for line in commits}
    wrong = sum(counted[epoch].bit_count() != SAMPLES for epoch in whole) + sum(n != BATCH for n in each.values())
    missing = last + 1 - len(found)
    return Record(len(found), sum(len(facts) > 1 for facts in found.values()), gaps, missing, wrong)


def left_over(folder: Path, *, within: float = 5.0) -> list[str]:
    """Processes of the run in this folder, and temporary files. (Shared memory has no names: it ends with its processes.)"""
    deadline = time.monotonic() + within
    while True:
        found = [f"process {pid}" for pid in _processes(folder)] + sorted(os.listdir(folder / "tmp"))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(_LOOK)


def _processes(folder: Path) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            environ = Path("/proc", name, "environ").read_bytes()
        except OSError:  # of another user, or it has ended
            continue
        if f"{_RUN}={folder}".encode() in environ:
            found.append(int(name))
    return found

"""`gradwire bench hangs`: are hangs reported in time, with the right rank, cause, bucket and function?

Each run is a job of `gradwire run`: `launch` calls the command itself, with ranks that are forks of this process, because importing
torch for each of them would take most of the time. `hang_faults.py` says what a report must contain.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers import when they are made
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from gradwire.cli import run as run_command
from gradwire.cli.arguments import at_least, positive
from gradwire.cli.bench import hang_script
from gradwire.cli.bench.forked import ForkedPython
from gradwire.cli.bench.hang_faults import FAULTS, SLOW, Outcome, judge, seconds_late
from gradwire.cli.experiment.machine import describe
from gradwire.cli.experiment.report import add_json_option, present
from gradwire.errors import UsageError
from gradwire.observe.hangs.analysis import SOFT_DEADLINE
from gradwire.observe.hangs.py_spy import program

_KINDS = {"shared_memory": True, "gloo": False}
"""The kinds of groups, and whether they compare collectives."""
_LAUNCH = "from gradwire.cli.bench.hangs import launch; launch()"
_REPORT = re.compile(rb"gradwire run: .*( waited for |its process has ended)")
_STEPS = 20
_LIMIT = 300.0
"""Seconds after which a run is given up."""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Declare `gradwire bench hangs` and its options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "hangs",
        help="whether hangs are reported in time, and correctly",
        description="Start jobs of gradwire run in which one rank hangs in one of eight ways, and check each report: within one "
        "second of the soft deadline, the right rank, cause, bucket and function. And jobs in which one rank is 30 % slower "
        "than the others, which must not be reported. The exit code is 1 if one run is wrong. The function of a stopped process "
        "is checked where py-spy is installed.",
    )
    add = parser.add_argument
    add("--ranks", type=at_least(2), default=8, metavar="N", help="ranks of a job (default: %(default)s)")
    add("--repeat", type=at_least(0), default=10, metavar="N", help="runs of each fault (default: %(default)s)")
    add("--healthy", type=at_least(0), default=0, metavar="N", help="healthy runs of each kind (default: %(default)s)")
    add("--at-once", type=at_least(1), default=4, metavar="N", help="runs at the same time (default: %(default)s)")
    add(
        "--kinds",
        type=_names(_KINDS),
        default=list(_KINDS),
        metavar="KINDS",
        help=f"groups: {', '.join(_KINDS)} (default: all)",
    )
    add(
        "--faults",
        type=_names(FAULTS),
        default=list(FAULTS),
        metavar="FAULTS",
        help=f"{', '.join(FAULTS)} (default: all)",
    )
    add(
        "--hang-after",
        type=positive,
        default=SOFT_DEADLINE,
        metavar="SECONDS",
        help="the soft deadline (default: %(default)g)",
    )
    add_json_option(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the jobs, show the results, and return 1 if one of them is wrong."""
    _warm_up()
    planned = [
        Outcome(kind, fault, (3 * number + 1) % args.ranks)
        for number in range(args.repeat)
        for fault in args.faults
        for kind in args.kinds
    ]
    planned += [Outcome(kind, SLOW, n % args.ranks) for n in range(args.healthy) for kind in args.kinds]
    if not planned:
        raise UsageError("bench hangs: nothing to do. Ask for runs with --repeat or --healthy.")
    console = Console(highlight=False)
    began = time.monotonic()
    with _directory() as directory:
        for number, outcome in enumerate(_run_all(planned, directory, args), 1):
            words = "; ".join(outcome.problems) or "right"
            console.print(f"{number}/{len(planned)} {outcome.kind} {outcome.fault}: {words}", markup=False)
    settings = {
        "ranks": args.ranks,
        "soft deadline": f"{args.hang_after:g} s",
        "runs": f"{len(planned)} in {time.monotonic() - began:.0f} s, {args.at_once} at the same time",
        "py-spy": program() or "not installed: the function of a stopped process is not checked",
    }
    wrong = [outcome for outcome in planned if outcome.problems]
    lines = [f"{outcome.kind}, {outcome.fault}: {'; '.join(outcome.problems)}" for outcome in wrong]
    lines.append(f"{len(planned) - len(wrong)} of {len(planned)} runs are right.")
    facts = {**describe(torch.device("cpu")), **settings}
    present(facts, [_table(planned)], lines, data=_as_json(facts, planned), json_file=args.json, console=console)
    return 1 if wrong else 0


def _warm_up() -> None:
    """Import here, once, what ranks would import each for themselves. Nothing in here may start a thread."""
    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.ones(1))
    torch.optim.SGD([parameter], 0.1).step()
    next(iter(DataLoader([torch.ones(1)])))  # type: ignore[arg-type]


@contextmanager
def _directory() -> Iterator[Path]:
    """A directory with the script. Not TemporaryDirectory, which forks would remove when they exit."""
    path = Path(tempfile.mkdtemp(prefix="gradwire-hangs-"))
    try:
        shutil.copy(hang_script.__file__, path / "train.py")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


class _Job:
    """One run under way."""

    def __init__(self, outcome: Outcome, directory: Path, args: argparse.Namespace, number: int) -> None:
        self.outcome = outcome
        self.directory = directory / f"run-{number}"
        self._deadline: float = args.hang_after
        self._ends = time.monotonic() + _LIMIT
        options = ["-n", str(args.ranks), "--run-dir", str(self.directory), "--hang-after", str(args.hang_after)]
        script = [str(directory / "train.py"), outcome.kind, outcome.fault, str(outcome.victim), str(_STEPS)]
        self.process = ForkedPython(
            [sys.executable, "-c", _LAUNCH, *options, "--timeout", "0.5", *script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            process_group=0,
        )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._output = b""

    def read(self) -> bool:
        """Read what it has printed, and end it once it has reported. False when it has ended."""
        assert self.process.stdout is not None
        data = self.process.stdout.read()
        if data == b"":
            return False
        self._output += data or b""
        if self.outcome.reported is None and _REPORT.search(self._output):
            self.outcome.reported = time.monotonic_ns()
            self._take_report()
            self.process.send_signal(signal.SIGTERM)
        return True

    def check_time(self) -> None:
        """End it if it takes too long."""
        if time.monotonic() > self._ends:
            self._ends += _LIMIT
            self.outcome.problems.append(f"still running after {_LIMIT:g} s")
            self.process.send_signal(signal.SIGTERM)

    def _take_report(self) -> None:
        saved = self.directory / "hang-1.json"
        if saved.exists():
            self.outcome.report = json.loads(saved.read_text())
            self.outcome.late = seconds_late(self.outcome, self.directory, self._deadline)

    def end(self) -> Outcome:
        """Check what it has reported."""
        outcome = self.outcome
        code = self.process.wait()
        outcome.output = self._output.decode(errors="replace")
        if outcome.fault == SLOW:
            if outcome.reported is not None or any(self.directory.glob("hang-*.json")):
                outcome.problems.append("a healthy run was reported")
            elif code != 0:
                outcome.problems.append(f"exit code {code}")
        else:
            outcome.problems += judge(outcome, py_spy=program() is not None, compares=_KINDS[outcome.kind])
        shutil.rmtree(self.directory, ignore_errors=True)
        return outcome


def _run_all(planned: Sequence[Outcome], directory: Path, args: argparse.Namespace) -> Iterator[Outcome]:
    """Run all, some at the same time, and yield each when it has ended."""
    left = iter(enumerate(planned))
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            number, outcome = next(left, (0, None))
            if outcome is not None:
                job = _Job(outcome, directory, args, number)
                selector.register(job.process.stdout, selectors.EVENT_READ, job)  # type: ignore[arg-type]

        try:
            for _ in range(args.at_once):
                start()
            while selector.get_map():
                for key, _ in selector.select(1.0):
                    job: _Job = key.data
                    if not job.read():
                        selector.unregister(key.fileobj)
                        yield job.end()
                        start()
                for key in selector.get_map().values():
                    key.data.check_time()
        finally:
            for key in selector.get_map().values():
                key.data.process.kill()  # its ranks end with it
                key.data.process.wait()


def launch() -> None:
    """The main function of a launcher: `gradwire run` with the arguments in sys.argv, and ranks that are forks."""
    parser = argparse.ArgumentParser()
    run_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["run", *sys.argv[1:]])
    args.debug = False
    sys.exit(run_command.run(args, popen=ForkedPython))


def _table(outcomes: Iterable[Outcome]) -> Table:
    outcomes = list(outcomes)
    table = Table(caption="The latest report: seconds after the soft deadline.")
    for head in ("group", "fault", "right", "latest"):
        table.add_column(head, justify="left" if head in ("group", "fault") else "right")
    runs = Counter((outcome.kind, outcome.fault) for outcome in outcomes)
    for (kind, fault), number in sorted(runs.items()):
        of_these = [outcome for outcome in outcomes if (outcome.kind, outcome.fault) == (kind, fault)]
        right = sum(not outcome.problems for outcome in of_these)
        late = [outcome.late for outcome in of_these if outcome.report is not None]
        words = FAULTS[fault].words if fault in FAULTS else "none: one rank is 30 % slower"
        table.add_row(kind, words, f"{right} of {number}", f"{max(late):.2f}" if late else "")
    return table


def _as_json(facts: dict[str, Any], outcomes: Iterable[Outcome]) -> dict[str, Any]:
    runs = [
        {
            "group": outcome.kind,
            "fault": outcome.fault,
            "rank": outcome.victim,
            "late": outcome.late,
            "problems": outcome.problems,
            "report": outcome.report,
            "output": outcome.output,
        }
        for outcome in outcomes
    ]
    return {"benchmark": "hangs", "settings": facts, "runs": runs}


def _names(known: Iterable[str]) -> Any:
    names = list(known)

    def parse(text: str) -> list[str]:
        words = [word.strip() for word in text.split(",")]
        if unknown := [word for word in words if word not in names]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)!r} is not one of {', '.join(names)}")
        return list(dict.fromkeys(words))

    return parse

"""`python -m detection.hangs`: are hangs reported in time, with the right rank, cause, bucket and function?

Jobs of `gradwire run` in which one rank hangs in one of eight ways: each report must come within one second of the soft deadline.
And jobs in which one rank is 30 % slower than the others, which must not be reported. The exit code is 1 if one run is wrong. The
function of a stopped process is checked where py-spy is installed. Ranks are forks of this process, because importing torch for
each of them would take most of the time. `hang_faults.py` defines what a report must contain.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import when they are made
from torch import nn
from torch.utils.data import DataLoader

from detection import hang_script
from detection.hang_faults import FAULTS, SLOW, Trial, judge, seconds_late
from gradwire.cli.arguments import at_least, positive
from gradwire.observe.hangs import SOFT_DEADLINE
from gradwire.observe.hangs.stacks import program
from helpers.forked_python import ForkedPython

_KINDS = {"shared_memory": True, "gloo": False}
"""The kinds of groups, and whether they compare collectives."""
_LAUNCH = "from helpers.forked_python import launch; launch()"
_REPORT = re.compile(rb"gradwire run: .*( waited for |its process has ended)")
_STEPS = 20
_LIMIT = 300.0
"""Seconds after which a run is given up."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m detection.hangs", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=at_least(2), default=8, metavar="N", help="ranks of a job (default: %(default)s)")
    add("--repeat", type=at_least(0), default=10, metavar="N", help="runs of each fault (default: %(default)s)")
    add("--healthy", type=at_least(0), default=0, metavar="N", help="healthy runs of each kind (default: %(default)s)")
    add("--at-once", type=at_least(1), default=4, metavar="N", help="runs at the same time (default: %(default)s)")
    add("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS), help="kinds of groups (default: all)")
    add("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="faults (default: all)")
    add(
        "--hang-after",
        type=positive,
        default=SOFT_DEADLINE,
        metavar="SECONDS",
        help="the soft deadline (default: %(default)g)",
    )
    add("--json", type=Path, metavar="FILE", help="also write all runs to FILE")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Run the jobs, print the results, and return 1 if one of them is wrong."""
    args = parse(words)
    _warm_up()
    planned = [
        Trial(kind, fault, (3 * number + 1) % args.ranks)
        for number in range(args.repeat)
        for fault in args.faults
        for kind in args.kinds
    ]
    planned += [Trial(kind, SLOW, n % args.ranks) for n in range(args.healthy) for kind in args.kinds]
    began = time.monotonic()
    with _directory() as directory:
        for number, trial in enumerate(_run_all(planned, directory, args), 1):
            print(
                f"{number}/{len(planned)} {trial.kind} {trial.fault}: {'; '.join(trial.problems) or 'right'}",
                flush=True,
            )
    for kind, fault in sorted({(trial.kind, trial.fault) for trial in planned}):
        these = [trial for trial in planned if (trial.kind, trial.fault) == (kind, fault)]
        late = [trial.late for trial in these if trial.report is not None]
        latest = f", latest report {max(late):.2f} s after the soft deadline" if late else ""
        print(f"{kind} {fault}: {sum(not trial.problems for trial in these)} of {len(these)} right{latest}")
    right = sum(not trial.problems for trial in planned)
    print(
        f"{right} of {len(planned)} runs are right ({time.monotonic() - began:.0f} s; py-spy: {program() or 'not installed'})"
    )
    if args.json is not None:
        args.json.write_text(json.dumps([vars(trial) for trial in planned], indent=1))
    return 0 if right == len(planned) else 1


def _warm_up() -> None:
    """Import here, once, what ranks would import each for themselves. Nothing in here may start a thread."""
    torch.set_num_threads(1)
    parameter = nn.Parameter(torch.ones(1))
    torch.optim.SGD([parameter], 0.1).step()
    next(iter(DataLoader([torch.ones(1)])))


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

    def __init__(self, trial: Trial, directory: Path, args: argparse.Namespace, number: int) -> None:
        self.trial = trial
        self.directory = directory / f"run-{number}"
        self._deadline: float = args.hang_after
        self._ends = time.monotonic() + _LIMIT
        options = ["-n", str(args.ranks), "--run-dir", str(self.directory), "--hang-after", str(args.hang_after)]
        script = [str(directory / "train.py"), trial.kind, trial.fault, str(trial.victim), str(_STEPS)]
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
        if self.trial.reported is None and _REPORT.search(self._output):
            self.trial.reported = time.monotonic_ns()
            self._take_report()
            self.process.send_signal(signal.SIGTERM)
        return True

    def check_time(self) -> None:
        """End it if it takes too long."""
        if time.monotonic() > self._ends:
            self._ends += _LIMIT
            self.trial.problems.append(f"still running after {_LIMIT:g} s")
            self.process.send_signal(signal.SIGTERM)

    def _take_report(self) -> None:
        saved = self.directory / "hang-1.json"
        if saved.exists():
            self.trial.report = json.loads(saved.read_text())
            self.trial.late = seconds_late(self.trial, self.directory, self._deadline)

    def end(self) -> Trial:
        """Check what it has reported."""
        trial = self.trial
        code = self.process.wait()
        trial.output = self._output.decode(errors="replace")
        if trial.fault == SLOW:
            if trial.reported is not None or any(self.directory.glob("hang-*.json")):
                trial.problems.append("a healthy run was reported")
            elif code != 0:
                trial.problems.append(f"exit code {code}")
        else:
            trial.problems += judge(trial, py_spy=program() is not None, compares=_KINDS[trial.kind])
        shutil.rmtree(self.directory, ignore_errors=True)
        return trial


def _run_all(planned: Sequence[Trial], directory: Path, args: argparse.Namespace) -> Iterator[Trial]:
    """Run all, some at the same time, and yield each when it has ended."""
    left = iter(enumerate(planned))
    with selectors.DefaultSelector() as selector:

        def start() -> None:
            number, trial = next(left, (0, None))
            if trial is not None:
                job = _Job(trial, directory, args, number)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""An elastic run whose members kill themselves: 60 faults here, as many as you like by `python -m benchmarks faults`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import faults
from benchmarks.__main__ import parser
from benchmarks.faults_run import CommitLine, Launch
from gradwire.errors import UsageError


def test_members_that_are_killed_leave_no_trace_in_what_the_others_train(start: Launch) -> None:
    options = {"faults": 60, "ranks": 4, "rate": 15, "width": 16, "timeout": 300}
    words = ["faults", "--no-plain", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    result = faults.run(parser().parse_args(words), Console(file=io.StringIO()), start)
    assert result.error is None, result.lines
    assert int(result.figures[0].rows["all"]["number"]) >= 60


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    args = parser().parse_args(["faults", "--plot", str(tmp_path / "faults.txt")])
    with pytest.raises(UsageError, match="unsupported file type"):
        faults.run(args, Console(), lambda *_: pytest.fail("it has started"))


def test_what_members_wrote_is_compared() -> None:
    args = parser().parse_args(["faults"])
    full = f"{(1 << 64) - 1:x}"

    def line(at: float, member: str, step: int, epoch: int, digest: str, samples: str = full) -> CommitLine:
        return CommitLine(at, member, step, epoch, digest, 2, samples)

    commits = [
        line(1.0, "a", 0, 0, "x"),
        line(1.0, "b", 0, 0, "x"),
        line(2.0, "a", 1, 1, "y"),
        line(2.1, "a", 2, 1, "z"),
    ]
    killed = [{"time": 1.5, "member": "b", "kind": "kill", "place": "vote", "step": 1, "epoch": 0}]
    good = faults.result({}, args, commits, killed, hubs=0, plain=20.0)
    assert good.error is None
    assert good.figures[0].rows["vote"]["wait"].median == pytest.approx(0.5)
    assert good.figures[0].rows["all"]["goodput"] == pytest.approx(2 / 1.1 / 20)
    pictured = faults.history(commits, [*killed, {"time": 9.0}])
    assert (pictured.seconds, pictured.faults) == (pytest.approx(1.1), [0.5])
    assert [step for _, step in pictured.progress] == [0, 1, 2, 3]
    assert faults.result({}, args, commits, killed, hubs=0, rest=["process 1"]).error is not None
    for wrong in (
        line(2.0, "c", 1, 1, "other"),
        line(3.0, "a", 4, 1, "w"),
        line(3.0, "d", 4, 1, "w"),
        line(3.0, "a", 3, 1, "w", "ff"),
        line(3.0, "a", 3, 1, "w", full),  # the samples of another step
    ):
        assert faults.result({}, args, [*commits, wrong], killed, hubs=0).error is not None

"""An elastic run whose members kill themselves: a few faults here, as many as you like by `python -m benchmarks faults`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import faults
from benchmarks.__main__ import parser


def test_members_that_are_killed_leave_no_trace_in_what_the_others_train(tmp_path: Path) -> None:
    words = [
        "faults",
        "--faults",
        "4",
        "--ranks",
        "4",
        "--rate",
        "30",
        "--width",
        "16",
        "--settle",
        "0.2",
        "--timeout",
        "300",
    ]
    result = faults.run(parser().parse_args(words), Console(file=io.StringIO()))
    assert result.error is None, result.lines
    assert int(result.figures[0].rows["all"]["number"]) >= 3


def test_what_members_wrote_is_compared() -> None:
    args = parser().parse_args(["faults"])
    commits = [[1.0, "a", 0, 0, "x", 2], [1.0, "b", 0, 0, "x", 2], [2.0, "a", 1, 1, "y", 1], [2.1, "a", 2, 1, "z", 1]]
    killed = [{"time": 1.5, "member": "b", "kind": "kill", "place": "vote", "step": 1, "epoch": 0}]
    good = faults.result({}, args, commits, killed, hubs=0)
    assert good.error is None
    assert good.figures[0].rows["vote"]["wait"].median == pytest.approx(0.5)
    for wrong in ([2.0, "c", 1, 1, "other", 2], [3.0, "a", 4, 1, "w", 1], [3.0, "d", 4, 1, "w", 1]):
        assert faults.result({}, args, [*commits, wrong], killed, hubs=0).error is not None

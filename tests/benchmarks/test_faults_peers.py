"""An elastic run and its peers under the same kills: by `python -m benchmarks faults --peer …`."""

from __future__ import annotations

import functools
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import faults_peers, options
from benchmarks.__main__ import parser
from benchmarks.faults_contenders import Lines, torchft_version
from benchmarks.faults_peers import OURS, RESTART, Trial, faults_in, result, row_of, started, trial
from benchmarks.faults_plot import History, draw


def test_repeated_choices_are_those_of_the_peers() -> None:
    assert (*faults_peers.PEERS, RESTART) == options.PEERS


@pytest.mark.parametrize("name", [OURS, pytest.param(RESTART, marks=pytest.mark.acceptance)])
def test_ranks_are_killed_while_they_train(name: str) -> None:
    words = "faults --peer restart --ranks 3 --slots 4 --width 16 --duration 2 --interval 0.5 --checkpoint 0.1"
    args = parser().parse_args(words.split())
    chosen = {"ranks": args.ranks, "width": args.width, "slots": args.slots, "checkpoint": 0}
    start = functools.partial(started, name, args, chosen, sys.executable)
    one = trial(name, start, args, Console(file=io.StringIO()), kills=True)
    again, differ, skipped, _ = faults_in(one)
    assert one.history.faults
    assert not differ
    assert not skipped
    assert not again or name == RESTART


def _trial(*lines: tuple[float, int, int, bool, str], faults: tuple[float, ...] = ()) -> Trial:
    tried = [[at, pid, step, int(committed), 2, 64, bits] for at, pid, step, committed, bits in lines]
    commits = [(at, step, 2) for at, _, step, committed, _ in lines if committed]
    return Trial(History("a", 10.0, commits, faults), tried, {1: -1.0, 2: -1.0, 3: 3.0}, 0.0)


def test_steps_that_were_lost_dropped_skipped_or_unlike_are_found() -> None:
    clean = [(1.0, 1, 5, True, "x"), (1.0, 2, 5, True, "x"), (2.0, 1, 6, True, "y"), (2.0, 2, 6, True, "y")]
    assert faults_in(_trial(*clean)) == (set(), set(), set(), set())
    assert faults_in(_trial(*clean, (4.0, 3, 6, True, "y")))[0] == {6}
    assert faults_in(_trial(*clean, (2.1, 2, 7, True, "z"), (2.1, 1, 7, True, "w")))[1] == {7}
    assert faults_in(_trial(*clean, (2.1, 2, 8, True, "z")))[2] == {(2, 7)}
    assert faults_in(_trial(*clean, (2.1, 2, 7, False, "")))[3] == {7}


def test_progress_is_made_by_steps_that_nobody_had_committed() -> None:
    lines = [(1.0, 1, 5, True, "x"), (2.0, 1, 6, True, "y"), (4.0, 3, 6, True, "y"), (5.0, 3, 7, True, "z")]
    one = _trial(*lines, faults=(2.5, 9.0))
    assert one.history.progress == [(0.0, 0), (1.0, 1), (2.0, 2), (5.0, 3)]
    row = row_of(one, {"ddp": 0.6, "torch-ddp": 0.3})
    assert row["wait"].seconds == (2.5, 1.0)  # the window ended without another step
    assert (row["goodput"], row["of torch"], row["repeated"]) == (pytest.approx(0.5), pytest.approx(1.0), 1)
    args = parser().parse_args(["faults", "--peer", "restart"])
    assert result({}, args, {"restart": row}, []).error is None
    assert result({}, args, {OURS: row}, []).error is not None


def test_a_line_that_is_being_written_is_read_later(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    lines = Lines(file)
    assert lines.new() == []
    file.write_text("[1]\n[2")
    assert lines.new() == [[1]]
    file.write_text("[1]\n[23]\n")
    assert lines.new() == [[23]]


def test_torchft_is_skipped_with_the_reason_where_it_is_missing(tmp_path: Path) -> None:
    version, reason = torchft_version(str(tmp_path / "python"))
    assert not version
    assert "No such file" in reason
    version, reason = torchft_version(sys.executable)
    assert version or "torchft" in reason


@pytest.mark.usefixtures("fonts")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [History(name, 10.0, [(at / 4, at, 2 + at % 2) for at in range(20)], [2.0, 7.0]) for name in "ab"]
    draw(tmp_path / "a.png", runs, title="a title", footer="a machine", pace=5.0)
    assert (tmp_path / "a.png").stat().st_size > 10_000

"""`gradwire top` on rings that are made up."""

import contextlib
import os
import pty
import threading
from pathlib import Path

import pytest

from gradwire.cli import main, top
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import RunOutcome, save
from gradwire.observe.stragglers.steps import Phase
from gradwire.runtime.host import ProcessState
from helpers.made_steps import made_steps, write_rings

NOBODY = 2**22 + 1
"""No process has this number."""


@pytest.fixture
def run(tmp_path):
    write_rings(tmp_path, made_steps(3, 40, {(1, Phase.DATA): 1.0}), size=4, pid=NOBODY)
    return str(tmp_path)


def test_one_picture(run, capsys):
    assert main(["top", run, "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "step", "step", "ms", "compute", "exposed", "bytes", "late", "ms", "now"]
    assert [line.split()[0] for line in lines[2:6]] == ["0", "1", "2", "3"]
    assert lines[3].split()[-1] == "gone"
    assert lines[5].rstrip().endswith("not recorded yet")
    assert "last warning: rank 1 is slow in data" in "\n".join(lines)
    assert max(map(len, lines)) <= 80


def test_without_a_terminal_lines_are_printed_until_the_run_is_over(run, capsys):
    assert main(["top", run]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("step 40, ")
    assert ", slowest rank 1 (" in line
    assert ", 3 of 4 ranks recorded so far, 3 ranks ended or stopped; last warning: rank 1 is slow in data (" in line


def test_the_launcher_says_how_the_run_has_ended_after_its_ranks(run, capsys, monkeypatch):
    """Its ranks end while top looks, and the launcher says how a moment later."""
    states = iter([ProcessState.RUNNING] * 3)
    monkeypatch.setattr(RunFollower, "state", lambda self, rank: next(states, ProcessState.GONE))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            save(Path(run), RunOutcome("rank 1 failed first", 1, None, (), time=2e9))

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert main(["top", run, "--every", "7"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.split("; last warning")[0].endswith(", 3 of 4 ranks recorded, rank 1 failed first")
    assert slept == [7.0, top._MOMENT]


def test_on_a_terminal_it_draws_until_the_run_is_over(run, monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    before = os.dup(1)
    data = bytearray()

    def read_all() -> None:
        with contextlib.suppress(OSError):  # at the end
            while some := os.read(ours, 100_000):
                data.extend(some)

    read = threading.Thread(target=read_all)
    read.start()
    try:
        os.dup2(theirs, 1)
        assert main(["top", run]) == 0
    finally:
        os.dup2(before, 1)
        for fd in (before, theirs):
            os.close(fd)
        read.join()
        os.close(ours)
    assert b"slowest rank 1" in data
    assert b"\x1b[?25l" not in data


def test_ctrl_c_ends_it(tmp_path, monkeypatch, capsys):
    write_rings(tmp_path, made_steps(2, 5), size=2)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", interrupt)
    assert main(["top", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("step 5, ")


def test_a_directory_without_a_run(tmp_path, capsys, monkeypatch):
    assert main(["top", str(tmp_path)]) == 2
    assert "no flight recorder has written here" in capsys.readouterr().err
    assert main(["top", str(tmp_path / "none")]) == 2
    assert "there is no directory" in capsys.readouterr().err

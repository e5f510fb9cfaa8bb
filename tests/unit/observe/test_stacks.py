"""Stacks of ranks that may not answer."""

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

import gradwire
from gradwire.observe.hangs import stacks as hang_stacks
from gradwire.observe.hangs.stacks import _QUESTIONS, _STARTERS, Frame, parse_dump, parse_stacks, read_stacks
from gradwire.observe.recording import _header
from gradwire.observe.rings.run_follower import RunFollower

DUMP = [
    {"thread_id": 7, "frames": [{"name": "run", "filename": "/a.py", "line": 3}]},
    {"thread_id": 6, "frames": [{"name": "_answer", "filename": _QUESTIONS, "line": 1}]},
    {"thread_id": 5, "frames": [{"name": "stop", "filename": _QUESTIONS, "line": 9}]},
]


def test_what_py_spy_writes_is_read_with_the_main_thread_first_also_while_it_stops_the_thread_that_answers():
    main, other = parse_dump(json.dumps(DUMP), main=5)
    assert (main, other) == ((Frame(_QUESTIONS, 9, "stop"),), (Frame("/a.py", 3, "run"),))


@pytest.mark.parametrize("text", ["", "Error: no such process", "{}", "[1]", '[{"thread_id": 1}]', "null"])
def test_what_py_spy_does_not_write_is_no_stack(text):
    assert parse_dump(text, main=5) == []


def test_without_py_spy_there_are_no_stacks(monkeypatch):
    monkeypatch.setattr(hang_stacks, "program", lambda: None)
    assert hang_stacks.dump_stacks({"a": os.getpid()}, within=1.0) == {}


def test_the_file_of_stacks_does_not_grow_forever(recorded):
    path = recorded / "rank-0.stacks"
    with path.open("a") as file:
        file.write("x" * (1 << 20) + "\n")
    [stacks] = read_stacks({path: _header(0, 1)}).values()
    assert "test_the_file_of_stacks_does_not_grow_forever" in [frame.function for frame in stacks[0]]
    assert path.stat().st_size < 1 << 20


def test_a_rank_that_answers_gets_no_signal_which_could_crash_it(recorded, monkeypatch):
    """faulthandler's handler reads the frames of threads that run, and may find them gone."""
    monkeypatch.setattr(hang_stacks, "_signal", lambda pid: pytest.fail("a signal"))
    with closing(RunFollower(recorded)) as run:
        run.look()
        [stacks] = run.stacks(run.ranks.values(), within=60.0).values()
    assert "test_a_rank_that_answers_gets_no_signal_which_could_crash_it" in [frame.function for frame in stacks[0]]


def test_of_a_rank_that_was_asked_twice_the_last_answer_counts():
    text = "".join(
        f'Thread 0x01 (most recent call first):\n  File "/a.py", line {n} in f\n  File "/a.py", line 1 in g\n'
        for n in (2, 3)
    )
    [stack] = parse_stacks(text, main=1)
    assert [frame.line for frame in stack] == [3, 1]


def test_the_files_that_start_scripts_are_there():
    """Their frames are left out of reports, by the ends of their paths."""
    source = Path(gradwire.__file__).parent.parent
    assert [path for path in _STARTERS if not source.joinpath(path.lstrip("/")).is_file()] == []

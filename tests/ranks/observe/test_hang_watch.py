"""Hangs of ranks that are processes, and the state of a process."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from gradwire.cli import main
from gradwire.observe.hangs import stacks as hang_stacks
from gradwire.observe.hangs.hang_report import saved_hangs
from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.hangs.stacks import read_stacks
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.runtime.host import ProcessState, process_start, process_state
from helpers.waiting import wait_until

RANK = """
import os, re, sys
import torch
from gradwire import observe
from gradwire.groups.ledger import Ledger
from gradwire.groups.work import Work
from gradwire.collectives import all_reduce

directory, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
observe.start(directory, rank=rank, size=2)
ledger = Ledger(name="world", rank=rank, size=2)

def submit():
    work = Work(all_reduce(torch.ones(3)), ledger, seq=ledger.next_seq(), timeout=100)
    ledger.submitted(work)
    return work

submit().finish()

def python_loop():
    print("ready", flush=True)
    while True:
        pass

def c_loop():
    print("ready", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")

def blocked():
    print("ready", flush=True)
    os.read(os.pipe()[0], 1)

if what == "waits":
    work = submit()
    ledger.waited(work)
    print("ready", flush=True)
    work.finish() if sys.stdin.readline() == "finish\\n" else work.fail(RuntimeError("lost"))
    print("over", flush=True)
    sys.stdin.readline()
{"python_loop": python_loop, "c_loop": c_loop, "blocked": blocked, "stopped": blocked, "killed": blocked}[what]()
"""


@pytest.fixture
def ranks(tmp_path, warm_python):
    """Start ranks that do what is asked; they are killed at the end."""
    script = str(tmp_path / "rank.py")
    started = []

    def start(*what):
        for rank, word in enumerate(what):
            started.append(warm_python.talk(RANK, str(tmp_path / "run"), str(rank), word, path=script))
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(process, state):
    wait_until(lambda: process_state(process.pid) is state, f"process {process.pid} is {state}")


@pytest.fixture
def watch(tmp_path):
    watch = HangWatch(RunFollower(tmp_path / "run"), deadline=0.0)
    yield watch
    watch.run.close()


def reported(watch):
    """What it reports, once a rank has waited ten times as long as before."""
    report = []
    wait_until(lambda: report.extend(watch.check()) or report, "a hang is reported")
    return report


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("python_loop", r", running\): it is in user code: python_loop\(\) at .*rank.py:\d+"),
        ("c_loop", r", running\): it is in user code: c_loop\(\) at .*rank.py:\d+"),
        ("blocked", r", sleeping\): it is in user code: blocked\(\) at .*rank.py:\d+"),
        ("stopped", r", stopped\): its process is stopped"),
        ("killed", r"\): its process has ended"),
    ],
)
def test_the_rank_that_does_not_come_is_named(ranks, watch, tmp_path, what, words):
    waiting, culprit = ranks("waits", what)
    if what == "blocked":
        wait_for(culprit, ProcessState.SLEEPING)
    elif what == "stopped":
        culprit.send_signal(signal.SIGSTOP)
        wait_for(culprit, ProcessState.STOPPED)
    elif what == "killed":
        culprit.kill()
        culprit.wait()
    report = reported(watch)
    assert "rank 0 has waited for" in report[0]
    assert "all_reduce (operation #1 of world, 12 bytes)" in report[0]
    assert re.search(rf"rank 1 \(process {culprit.pid}{words}", report[1]), report
    assert watch.check() == []  # said once
    run = tmp_path / "run"
    assert report[-1] == f"  saved as {run / 'hang-1.json'}. To look again: gradwire inspect {run}"
    saved = json.loads((run / "hang-1.json").read_text())
    assert (saved["waiting"], saved["missing"], saved["suspects"][0]["rank"]) == ([0], [1], 1)
    assert waiting.poll() is None


@pytest.mark.parametrize("end", ["finish", "fail"])
def test_the_end_of_a_wait_is_reported_unless_it_is_an_error(ranks, watch, end, tmp_path):
    waiting, _ = ranks("waits", "blocked")
    assert len(reported(watch)) >= 2
    assert waiting.stdin is not None
    waiting.stdin.write(f"{end}\n")
    waiting.stdin.flush()
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "over\n"
    lines = watch.check()
    assert len(lines) == (end == "finish")
    for line in lines:
        assert re.match(r"all_reduce \(operation #1 of world\) has finished after [\d.]+ s: ranks continue; ", line)
    assert watch.check() == []
    [saved] = saved_hangs(tmp_path / "run")
    assert saved.ended == (end == "finish")


def test_the_state_of_a_process():
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        start = process_start(process.pid)
        assert start
        wait_for(process, ProcessState.SLEEPING)  # it may begin with a wait for the disk
        assert process_state(process.pid, start + "1") is ProcessState.GONE  # another process has the number now
        process.communicate()
    assert process_state(process.pid) is ProcessState.GONE


def test_inspect_shows_where_every_rank_is(ranks, tmp_path, capsys):
    waiting, culprit = ranks("waits", "python_loop")
    for named in (str(tmp_path / "run"), str(culprit.pid)):
        assert main(["inspect", named]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith(f"rank 0 (process {waiting.pid}): sleeping, at <module>() at ")
        assert re.fullmatch(r"    for [\d.]+ m?s in all_reduce \(operation #1 of world, 12 bytes\)", lines[1])
        assert lines[2].startswith(f"rank 1 (process {culprit.pid}): running, at python_loop() at ")
        assert "it is in user code: python_loop()" in lines[5]
    assert main(["inspect", "--stacks", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("    main thread:") == 2
    assert "    another thread:" not in lines  # that of the recorder, which waits for questions, is left out


@pytest.fixture
def fake_py_spy(tmp_path, monkeypatch):
    """Put a program in the place of py-spy that prints `text`, or sleeps for `seconds`."""

    def make(text, seconds=0, code=0):
        path = tmp_path / "py-spy"
        first = f"exec sleep {seconds}\n" if seconds else ""
        path.write_text(f"#!/bin/sh\n{first}cat <<'EOF'\n{text}\nEOF\nexit {code}\n")
        path.chmod(0o700)
        monkeypatch.setattr(hang_stacks, "program", lambda: str(path))

    return make


DUMP = [
    {"thread_id": 7, "frames": [{"name": "run", "filename": "/a.py", "line": 3}]},
    {"thread_id": 5, "frames": [{"name": "f", "filename": "/b.py", "line": 9}]},
]


@pytest.mark.parametrize(("seconds", "code", "found"), [(0, 0, {"a": "[]\n"}), (60, 0, {}), (0, 1, {})])
def test_py_spy_is_bounded_and_may_fail(fake_py_spy, monkeypatch, seconds, code, found):
    fake_py_spy("[]", seconds, code)
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)  # as when the interpreter ends
    assert hang_stacks.dump_stacks({"a": os.getpid()}, within=5.0 if found else 0.5) == found


def test_a_process_that_is_stopped_is_looked_at_by_py_spy(tmp_path, fake_py_spy):
    fake_py_spy(json.dumps(DUMP))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert process_state(process.pid) is ProcessState.STOPPED
        path = tmp_path / "rank-0.stacks"
        path.touch()
        found = read_stacks({path: {"pid": process.pid, "main_thread": 5}})
        process.kill()
    assert [frame.file for [frame] in found[path]] == ["/b.py", "/a.py"]

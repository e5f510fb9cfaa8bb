"""Hangs of real processes, seen from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from gradwire.cli import main
from gradwire.observe.hangs.hang_report import saved_hangs
from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.hangs.stacks import parse_stacks
from gradwire.observe.recording import _header
from gradwire.observe.report.findings import find
from gradwire.observe.report.load import load_report
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome, save
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import FlightRecorder
from gradwire.runtime.host import ProcessState, process_start, process_state
from helpers.recorder_put import put
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
    watch.close()


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


def test_waits_for_the_same_rank_are_counted_and_not_repeated(ring, tmp_path):
    """40 evaluations of 8 s on rank 1: one report, one file, and no error on the page of the run. Then a real hang."""
    directory = tmp_path / "run"
    evaluating = FlightRecorder(directory / "rank-1.ring", header=_header(1, 2), capacity=16)
    put(evaluating, RecordKind.GROUP, 1, group="world", nbytes=2)
    recorder = ring(0, waits=False)
    watch = HangWatch(RunFollower(directory), deadline=5.0)

    def wait(number, seconds):
        began = time.monotonic() - seconds
        for kind in (RecordKind.COLLECTIVE_SUBMITTED, RecordKind.COLLECTIVE_WAITED):
            put(recorder, kind, 0, group="world", ordinal=number, seq=number, label="loss", at=began)
        return watch.check()

    lines = []
    for number in range(1, 41):
        lines += wait(number, 8.0)
        put(recorder, RecordKind.COLLECTIVE_FINISHED, 0, group="world", ordinal=number, seq=number, duration=0.01)
        put(evaluating, RecordKind.COLLECTIVE_FINISHED, 1, group="world", ordinal=number, seq=number, duration=0.0)
        lines += watch.check()
    assert len(lines) == 4, lines  # who waits, for whom, where it is saved; that it has ended
    [saved] = saved_hangs(directory)
    assert (saved.count, saved.ended) == (40, True)
    assert saved.total == pytest.approx(320, rel=0.1)
    save(directory, RunOutcome("", None, None, (), time.time()))
    assert [one.title for one in find(load_report(directory)) if one.severity == "error"] == []
    assert wait(41, 9.0) == []  # no longer than those before
    put(recorder, RecordKind.COLLECTIVE_FINISHED, 0, group="world", ordinal=41, seq=41, duration=0.01)
    put(evaluating, RecordKind.COLLECTIVE_FINISHED, 1, group="world", ordinal=41, seq=41, duration=0.0)
    assert watch.check() == []
    assert "rank 0 has waited for 100.0 s in" in wait(42, 100.0)[0]
    [saved] = saved_hangs(directory)
    assert (saved.count, saved.ended) == (41, False)
    watch.close()
    evaluating.close()


def test_a_directory_without_rings_says_nothing(watch):
    assert watch.check() == []


def test_threads_of_other_kinds_of_text_are_read():
    text = """Thread 0x0000000000000002 [lane] (most recent call first):
  File "/a b.py", line 12 in f
  File "/c.py", line ??? in <module>

Current thread 0x0000000000000001 (most recent call first):
  File "/d.py", line 3 in g
"""
    main, other = parse_stacks(text, main=1)
    assert [str(frame) for frame in main.frames] == ["g() at /d.py:3"]
    assert [str(frame) for frame in other.frames] == ["f() at /a b.py:12", "<module>() at /c.py:0"]


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
        assert re.fullmatch(r"    for [\d.]+ s in all_reduce \(operation #1 of world, 12 bytes\)", lines[1])
        assert lines[2].startswith(f"rank 1 (process {culprit.pid}): running, at python_loop() at ")
        assert "it is in user code: python_loop()" in lines[5]
    assert main(["inspect", "--stacks", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count("    main thread:") == 2
    assert "    another thread:" not in lines  # that of the recorder, which waits for questions, is left out


def test_inspect_refuses_what_is_not_recorded(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no flight recorder" in capsys.readouterr().err
    assert main(["inspect", str(os.getpid())]) == 2
    assert "is not recorded" in capsys.readouterr().err
    assert main(["inspect", "999999999"]) == 2
    assert "999999999" in capsys.readouterr().err


@pytest.fixture
def ring(tmp_path):
    """A ring of a rank that waits in the first collective of a group of two, with these fields in its header."""
    recorders = []

    def make(rank, *, waits=True, **header):
        recorder = FlightRecorder(
            tmp_path / "run" / f"rank-{rank}.ring", header={**_header(rank, 2), **header}, capacity=16
        )
        recorders.append(recorder)
        put(recorder, RecordKind.GROUP, rank, group="world", nbytes=2)
        for kind in (RecordKind.COLLECTIVE_SUBMITTED, RecordKind.COLLECTIVE_WAITED) if waits else ():
            put(recorder, kind, rank, group="world", ordinal=1)
        return recorder

    (tmp_path / "run").mkdir()
    yield make
    for recorder in recorders:
        recorder.close()


def test_rings_of_an_earlier_run_are_not_looked_at(ring, tmp_path):
    ring(0)
    watch = HangWatch(RunFollower(tmp_path / "run", since=time.monotonic_ns()), deadline=0.0)
    assert watch.check() == []
    ring(1)
    assert "rank 1 has waited" in watch.check()[0]
    watch.close()


def test_a_report_that_cannot_be_saved_is_shown_all_the_same(ring, watch):
    ring(0)
    watch.run.directory.joinpath("hang-1.json").mkdir()
    *_, last = watch.check()
    assert last.startswith("  not saved: Is a directory. To look again: gradwire inspect ")


def test_a_launcher_that_has_missed_the_end_of_a_collective_reports_no_hang(ring, watch):
    """As after a reader of its output has kept it waiting while the ring went round."""
    recorder = ring(0)
    watch.run.look()
    assert watch.run.ranks[0].waiting_in() is not None
    put(recorder, RecordKind.COLLECTIVE_FINISHED, 0, group="world", ordinal=1)
    for number in range(40):
        put(recorder, RecordKind.MARK, 0, label="later", seq=number)
    watch.run.look()
    watch.run.look()
    assert watch.run.ranks[0].last[-1].seq == 39
    assert watch.run.ranks[0].waiting_in() is None


def test_a_rank_that_was_started_again_is_followed(ring, watch):
    ring(0)
    watch.run.look()
    put(ring(0), RecordKind.MARK, 0, label="again")
    watch.run.look()
    assert watch.run.ranks[0].last[-1].label == "again"


def test_ranks_of_other_hosts_are_neither_signaled_nor_said_to_have_ended(ring, watch, tmp_path, capsys):
    ring(0, clock="of another host", host="there")
    assert watch.check() == []
    assert watch.run.state(watch.run.ranks[0]) is ProcessState.UNKNOWN
    assert watch.run.stacks(watch.run.ranks.values()) == {}
    assert main(["inspect", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert f"rank 0 (process {os.getpid()} on there): unknown" in out
    assert " s in all_reduce" not in out


def test_an_error_ends_the_watch_and_not_the_run(watch, monkeypatch):
    def fail():
        raise OSError("stale file handle")

    monkeypatch.setattr(watch.run, "look", fail)
    [line] = watch.check_if_due()
    assert "OSError: stale file handle" in line
    assert watch.next_look == float("inf")
    assert watch.check_if_due() == []


def test_the_wait_of_a_rank_that_has_ended_does_not_go_on(ring, tmp_path, capsys):
    ring(0, process_start="1")
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "    at its end in all_reduce" in capsys.readouterr().out


def test_a_rank_that_the_launcher_has_ended_was_not_dead_while_others_waited(ring, tmp_path, capsys):
    gone = {"process_start": "1"}
    ring(0, **gone)
    absent = FlightRecorder(tmp_path / "run" / "rank-1.ring", header={**_header(1, 2), **gone}, capacity=16)
    put(absent, RecordKind.GROUP, 1, group="world", nbytes=2)
    absent.close()
    for stopped, said in ((False, "its process has ended"), (True, "the launcher has ended it since")):
        save(tmp_path / "run", RunOutcome("rank 0 failed", 0, None, (RankOutcome(1, -15, stopped),), time.time()))
        assert main(["inspect", str(tmp_path / "run")]) == 0
        assert f"  rank 1 (process {os.getpid()}): {said}" in capsys.readouterr().out
    save(tmp_path / "run", RunOutcome("", None, None, (), time.time()))  # it was waited for, and then not any more
    assert main(["inspect", str(tmp_path / "run")]) == 0
    assert "has waited" not in capsys.readouterr().out


def test_threads_are_not_taken_for_ranks_of_the_launcher(tmp_path, capsys):
    """Thread 1 of the process of rank 2 keeps thread 0 waiting; the launcher has ended rank 1, another process."""
    directory = tmp_path / "run"
    directory.mkdir()
    threads = FlightRecorder(directory / "rank-2.ring", header={**_header(2, 3), "process_start": "1"}, capacity=16)
    for number in range(2):
        put(threads, RecordKind.GROUP, number, group="inner", nbytes=2)
    for kind in (RecordKind.COLLECTIVE_SUBMITTED, RecordKind.COLLECTIVE_WAITED):
        put(threads, kind, 0, group="inner", ordinal=1)
    threads.close()
    save(directory, RunOutcome("rank 2 failed", 2, None, (RankOutcome(1, -15, stopped=True),), time.time()))
    assert main(["inspect", str(directory)]) == 0
    assert f"  rank 1 (process {os.getpid()}): its process has ended" in capsys.readouterr().out


def test_a_rank_that_has_ended_is_named_and_not_those_that_have_not_come_so_far(ring, watch):
    ring(0)
    late = FlightRecorder(watch.run.directory / "rank-1.ring", header=_header(1, 2), capacity=16)
    put(late, RecordKind.GROUP, 1, group="world", nbytes=3)
    ended = FlightRecorder(
        watch.run.directory / "rank-2.ring", header={**_header(2, 2), "process_start": "1"}, capacity=16
    )
    put(ended, RecordKind.GROUP, 2, group="world", nbytes=3)
    put(ended, RecordKind.FORWARD_BEGAN, 2, group="world", step=7)
    where, waits, *suspects, saved = watch.rank_ended(2)
    assert where.startswith("rank 2: gone, step 7, forward for")
    assert waits.startswith("rank 0 has waited for")
    assert [line.split(":")[0] for line in suspects] == [f"  rank 2 (process {os.getpid()})"]
    assert saved.startswith(f"  saved as {watch.run.directory / 'hang-1.json'}. To look again: gradwire inspect ")
    assert watch.rank_ended(5) == []  # never recorded
    late.close()
    ended.close()

"""Hangs of real processes, seen from outside."""

import os
import time

import pytest

from gradwire.cli import main
from gradwire.observe.hangs import stacks
from gradwire.observe.hangs.hang_report import saved_hangs
from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.hangs.stacks import parse_stacks
from gradwire.observe.recording import _header
from gradwire.observe.report.findings import find
from gradwire.observe.report.report_model import load_report
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome, save
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import FlightRecorder
from gradwire.runtime.host import ProcessState
from helpers.recorder_put import put


@pytest.fixture(autouse=True)
def no_py_spy(monkeypatch):
    """It would be started where it is installed."""
    monkeypatch.setattr(stacks, "program", lambda: None)


@pytest.fixture
def watch(tmp_path):
    watch = HangWatch(RunFollower(tmp_path / "run"), deadline=0.0)
    yield watch
    watch.run.close()


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
    watch.run.close()
    evaluating.close()


def test_a_directory_without_rings_reports_nothing(watch):
    assert watch.check() == []


def test_threads_of_other_kinds_of_text_are_read():
    text = """Thread 0x0000000000000002 [lane] (most recent call first):
  File "/a b.py", line 12 in f
  File "/c.py", line ??? in <module>

Current thread 0x0000000000000001 (most recent call first):
  File "/d.py", line 3 in g
"""
    main, other = parse_stacks(text, main=1)
    assert [str(frame) for frame in main] == ["g() at /d.py:3"]
    assert [str(frame) for frame in other] == ["f() at /a b.py:12", "<module>() at /c.py:0"]


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
    watch.run.close()


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


def test_an_error_ends_the_watch_and_not_the_run(ring, watch, monkeypatch):
    """Also while a rank waits, for whose sake it would look again soon."""

    def fail():
        raise OSError("stale file handle")

    ring(0)
    watch.run.look()
    watch.deadline = 60.0
    assert watch.run.ranks[0].waiting_in() is not None
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

"""Warnings in the records of a run: written by one function, merged over ranks, shown by commands."""

import json
from dataclasses import replace

import pytest

from gradwire import observe
from gradwire.cli import main
from gradwire.observe.hangs.analysis import Cause, Suspect
from gradwire.observe.hangs.hang_report import as_dict
from gradwire.observe.hangs.stacks import Frame
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.run_outcome import RunOutcome, save
from gradwire.observe.run_warnings import fold_repeated
from gradwire.observe.trace import trace_events
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.recorder.source import EventSource
from gradwire.recorder.writer import FlightRecorder
from gradwire.runtime.host import ProcessState, clock_identity
from helpers.made_rings import header
from helpers.recorder_put import put

K = RecordKind


def test_what_ranks_have_recorded_together_is_one_warning(ring, record):
    rings = [
        ring(rank, record(K.MARK, 1), record(K.WARNING, 500 + rank, label="NaN on rank 1", step=3), host="ab"[rank])
        for rank in (0, 1)
    ]
    rings.append(ring(2, record(K.WARNING, 100, label="rank 2 is slow")))
    first, second = observe.read_warnings(rings)
    assert (first.text, first.ranks, first.step) == ("rank 2 is slow", (2,), -1)
    assert (second.text, second.ranks, second.step) == ("NaN on rank 1", (0, 1), 3)
    assert str(first) == "rank 2 is slow (recorded by rank 2)"
    assert str(second) == "NaN on rank 1 (step 3, recorded by ranks 0, 1)"


def test_the_same_finding_in_two_steps_is_two_warnings(ring, record):
    both = [record(K.WARNING, time, label="NaN", step=time) for time in (1, 2)]
    assert [warning.step for warning in observe.read_warnings([ring(0, *both)])] == [1, 2]


def test_a_rank_keeps_its_last_warnings_only(ring, record):
    rank = RankProgress(0, {})
    rank.update(record(K.WARNING, time, label=str(time)) for time in range(100))
    assert [warning.label for warning in rank.warnings] == [str(time) for time in range(80, 100)]


def test_warnings_are_recorded_and_shown(recorded, capsys):
    EventSource("world", 0, 5).warn("the gradient of fc.weight is NaN", step=7)
    rings = observe.read_rings(recorded)
    (warning,) = observe.read_warnings(rings)
    assert (warning.text, warning.step) == ("the gradient of fc.weight is NaN", 7)
    assert [e["cat"] for e in trace_events(rings) if e["ph"] == "i"] == ["warning"]
    assert main(["inspect", str(recorded)]) == 0
    assert "warning: the gradient of fc.weight is NaN (step 7, recorded by rank 0)" in capsys.readouterr().out


def test_a_warning_does_not_move_its_rank_to_another_step(record):
    """`DivergenceCheck` counts from 1, and what is read late is about the step before."""
    rank = RankProgress(0, {})
    rank.update([record(K.STEP_ENDED, 1, step=29), record(K.WARNING, 2, label="replicas differ", step=30)])
    assert rank.step == 29


def test_of_a_run_that_is_over_the_reported_hang_is_mentioned(tmp_path, capsys):
    FlightRecorder(tmp_path / "rank-0.ring", header={**header(0, 1), "pid": 2**22 + 1}, capacity=4).close()
    assert main(["inspect", str(tmp_path)]) == 0
    assert "hang" not in capsys.readouterr().out
    (tmp_path / "hang-9.json").write_text("{}")
    suspect = Suspect(1, 7, Cause.DATA_LOADER, ProcessState.SLEEPING, where=Frame("train.py", 7, "load"))
    (tmp_path / "hang-10.json").write_text(json.dumps(as_dict(None, [suspect])))
    (tmp_path / "hang-11.json").write_text("{half")
    (tmp_path / "hang-12.json").write_text("[" * 100_000)
    assert main(["inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"While it ran, this was reported, and saved in {tmp_path}/hang-10.json" in said
    assert "  rank 1 (process 7, sleeping): it waits for its data loader: load() at train.py:7\n" in said


def test_of_a_run_that_is_over_its_launcher_says_how_it_ended(tmp_path, capsys):
    gone = {**header(0, 1), "pid": 2**22 + 1, "clock": clock_identity()}
    FlightRecorder(tmp_path / "rank-0.ring", header=gone, capacity=4).close()
    outcome = RunOutcome(
        "rank 0 failed (exit code 1, after 2.0 s)", 0, None, (), time=header(0, 1)["started_wall"] / 1e9 + 2
    )
    save(tmp_path, outcome)
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\nThe run has ended: rank 0 failed (exit code 1, after 2.0 s)\n")
    assert main(["top", "--once", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("· rank 0 failed (exit code 1, after 2.0 s)\n")
    save(tmp_path, replace(outcome, text=""))
    assert main(["inspect", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("\nThe run has ended: no rank has failed\n")
    save(
        tmp_path, replace(outcome, time=outcome.time - 3)
    )  # that of an earlier run, without whose launcher ranks record now
    assert main(["inspect", str(tmp_path)]) == 0
    assert "has ended" not in capsys.readouterr().out


@pytest.mark.parametrize("command", [["report", "--text"], ["inspect"], ["top", "--once"], ["trace"]])
def test_of_a_run_in_which_nothing_was_recorded_its_end_is_known(tmp_path, capsys, command):
    save(tmp_path, RunOutcome("rank 1 failed first (exit code 1, after 2.0 s)", 1, None, ()))
    assert main([*command, str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "no rank of this run was recorded. It has ended: rank 1 failed first (exit code 1, after 2.0 s)" in said


def test_without_a_recorder_a_warning_is_nothing():
    assert writer.active is None
    EventSource("world", 0, 5).warn("not recorded")
    assert writer.active is None


def test_the_first_warnings_outlive_their_records(tmp_path):
    recorder = FlightRecorder(tmp_path / "rank-0.ring", header=header(0, 1), capacity=4)
    writer.active = recorder
    try:
        EventSource("world", 0, 5).warn("NaN", step=3)
        for step in range(300):
            put(recorder, K.MARK, 0)
            EventSource("world", 0, 5).warn("later", step=step)
    finally:
        writer.active = None
        recorder.close()
    ring = observe.read_ring(recorder.path)
    found = observe.read_warnings([ring])
    assert [(one.text, one.step) for one in found[:2]] == [("NaN", 3), ("later", 0)]
    assert [one.step for one in found[1:]] == [*range(199), 298, 299]  # 200 are kept, and two are in the ring


def test_what_is_kept_and_in_the_ring_is_one_warning(recorded):
    EventSource("world", 0, 5).warn("NaN", step=3)
    assert [warning.text for warning in observe.read_warnings(observe.read_rings(recorded))] == ["NaN"]
    assert observe.read_rings(recorded)[0].descriptions["warning"][0]["text"] == "NaN"


def test_those_that_differ_in_the_step_alone_are_folded(ring, record):
    steps = [record(K.WARNING, 100 + step, label=f"in step {step}: NaN", step=step) for step in (3, 4, 5, 9)]
    others = [record(K.WARNING, 104, label="in step 4: infinite", step=4), record(K.WARNING, 300, label="slow")]
    others.append(record(K.WARNING, 301, label="slow"))
    merged = observe.read_warnings([ring(0, *steps, *others), ring(1, *steps[:1])])
    assert [str(one) for one in fold_repeated(merged)] == [
        "in step 3: NaN (step 3, recorded by ranks 0, 1)",
        "in step 4: NaN (step 4, and 2 times more, up to step 9, recorded by rank 0)",
        "in step 4: infinite (step 4, recorded by rank 0)",
        "slow (recorded by rank 0)",
    ]
    assert fold_repeated(merged[1:3])[0].repeats == ""


def test_a_warning_that_came_twice(ring, record):
    merged = observe.read_warnings([ring(0, *[record(K.WARNING, s, label=f"step {s}: NaN", step=s) for s in (3, 7)])])
    assert [str(one) for one in fold_repeated(merged)] == ["step 3: NaN (step 3, and in step 7, recorded by rank 0)"]

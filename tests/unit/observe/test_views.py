"""Rings of an elastic run that are made up: who the ranks are, what a report shows, and what is no reason to worry."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.observe.hangs.hang_watch import HangWatch
from gradwire.observe.report.findings import find
from gradwire.observe.report.render import render_page, render_text
from gradwire.observe.report.report_model import RunReport, load_report
from gradwire.observe.rings.ring import Ring, load_rings
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome, save
from gradwire.observe.rings.runs import clear_run
from gradwire.observe.rings.views import read_faults
from gradwire.observe.run_status import Condition, RunMonitor, stats_line
from gradwire.observe.trace import fault_events, trace_events
from gradwire.recorder.format import RecordKind as K
from gradwire.runtime.fault_record import FILE, record_fault
from gradwire.runtime.host import clock_identity, process_start
from gradwire.runtime.rank_error import RankError
from helpers.made_rings import MS, STEP, made, made_ring, write_ring

VIEWS = [("m-0", "m-1"), ("m-0",), ("m-0", "m-2")]
"""m-1 dies in step 3, and m-2 joins after step 5."""
BEGINS = [0, 3, 5]
RUNS, GONE = {"pid": os.getpid(), "process_start": process_start(os.getpid())}, {"pid": 2**22 + 1}


def elastic_ring(number: int, views: dict[int, int], commits: dict[int, int], **facts: Any) -> Ring:
    """The ring of process `number`, which enters these views and commits these steps, at times in milliseconds."""
    member, described, order = f"m-{number}", [], itertools.count()
    marks = [(at, K.VIEW, epoch) for epoch, at in views.items()]
    marks += [(at, K.STEP_COMMITTED, step) for step, at in commits.items()]
    records = []
    for at, kind, what in sorted(marks):
        place: dict[str, Any] = {"step": what}
        if kind is K.VIEW:
            members = VIEWS[what]
            place = {"step": BEGINS[what], "ordinal": what, "nbytes": len(members), "rank": members.index(member)}
            described.append(
                {"epoch": what, "members": members, "step": BEGINS[what], "retried": what == 1, "time": 1.8e9 + at}
            )
        records.append(made(next(order), at * MS, kind, group="view", **place))
    ring = made_ring(number, range(0), size=number + 1, member=member, clock=clock_identity(), **facts)
    return replace(ring, records=records, descriptions={**ring.descriptions, "view": described, "end": []})


def rings(*running: int) -> list[Ring]:
    facts = [RUNS if number in running else GONE for number in range(3)]
    return [
        elastic_ring(0, {0: 0, 1: 60, 2: 90}, {0: 10, 1: 20, 2: 30, 3: 70, 4: 80, 5: 100, 6: 110}, **facts[0]),
        elastic_ring(1, {0: 0}, {0: 10, 1: 20, 2: 30}, **facts[1]),
        elastic_ring(2, {2: 95}, {5: 100, 6: 110}, **facts[2]),
    ]


def died(directory: Path) -> None:
    record_fault(directory / FILE, member="m-1", kind="died", text="rank 1 (m-1) died: killed by SIGKILL")


def test_ranks_are_those_of_the_present_view(tmp_path: Path) -> None:
    first, second, third = rings(0, 1, 2)
    for ring in (first, second):
        write_ring(tmp_path, replace(ring, descriptions={"view": ring.descriptions["view"][:1]}))
    run = RunFollower(tmp_path)
    run.look()
    assert {rank: one.member for rank, one in run.ranks.items()} == {0: "m-0", 1: "m-1"}
    for ring in (first, replace(second, header={**second.header, **GONE}), third):
        write_ring(tmp_path, ring)
    run.ranks[1].header = {**second.header, **GONE}
    status = RunMonitor(run).status()  # which looks, as it was a rank
    assert [(one.rank, one.condition) for one in status.ranks] == [(0, Condition.STARTING), (1, Condition.STARTING)]
    assert {rank: one.member for rank, one in run.ranks.items()} == {0: "m-0", 1: "m-2"}
    assert len(run._open) == 2
    run.close()


def test_a_process_that_is_gone_is_no_rank_while_others_decide_on_a_view(tmp_path: Path) -> None:
    first, second, _ = rings(0)
    for ring in (first, second):
        write_ring(tmp_path, replace(ring, descriptions={"view": ring.descriptions["view"][:1]}))
    run = RunFollower(tmp_path)
    run.look()
    assert sorted(run.ranks) == [0]
    run.close()


def test_the_status_shows_the_view_and_who_came_and_went(tmp_path: Path) -> None:
    for ring in rings(0, 2):
        write_ring(tmp_path, ring)
    monitor = RunMonitor(RunFollower(tmp_path), size=5)
    monitor.look_back()
    status = monitor.status()
    assert status.view == "view 2 of 2 ranks since step 5 (m-2 joined)"
    assert status.members == f"rank 0 m-0 (process {os.getpid()}), rank 1 m-2 (process {os.getpid()})"
    assert len(status.ranks) == 2
    assert status.view in stats_line(status)
    monitor.run.close()


def test_launchers_that_record_in_one_directory_are_told_apart(tmp_path: Path) -> None:
    for order, member in enumerate(["a-0", "a-1", "b-0", "b-1"]):
        ring = made_ring(int(member[-1]), range(3), member=member, started_wall=order)
        write_ring(tmp_path, ring)
        RankError.of(ValueError(member), ring.rank).save(tmp_path, member)
    assert [ring.header["member"] for ring in load_rings(tmp_path)[0]] == ["a-0", "a-1", "b-0", "b-1"]
    save(tmp_path, RunOutcome("rank 1 failed", 1, None, (RankOutcome(1, 1, stopped=False),), time=1.0, launcher="b"))
    report = load_report(tmp_path)
    assert [(rank.rank, rank.member) for rank in report.ranks] == [(0, "b-0"), (1, "b-1"), (2, "a-0"), (3, "a-1")]
    assert {rank: error.text for rank, error in report.errors.items()} == {0: "b-0", 1: "b-1", 2: "a-0", 3: "a-1"}
    assert "ValueError: b-1" in find(report)[0].detail
    assert all(len(row) == 4 for row in (report.phases, report.lateness))


def test_a_report_of_a_run_that_went_well(tmp_path: Path) -> None:
    died(tmp_path)
    report = RunReport(rings(), directory=tmp_path)
    assert report.elastic is not None
    elastic = report.elastic
    assert [change for _, change in elastic.views] == ["", "m-1 died", "m-2 joined"]
    assert (elastic.committed, elastic.retried) == (7, 1)
    assert elastic.goodput == pytest.approx(
        (30 + 20 + 20) / 110
    )  # from 30 to 60 and from 80 to 90 ms nothing was committed
    for text in (render_text(report), render_page(report)):
        assert "7 steps committed, 1 step computed again, goodput 63.6%" in text
        assert "rank 1 (m-1) died: killed by SIGKILL" in text
        assert "m-2 joined" in text


def test_only_an_end_that_the_launcher_has_not_recorded_is_an_error(tmp_path: Path) -> None:
    ended = [replace(ring, descriptions={**ring.descriptions, "end": [{"time": STEP}]}) for ring in rings()]
    of_run = [ended[0], rings()[1], ended[2]]
    assert [one.severity for one in find(RunReport(of_run, directory=tmp_path))].count("error") == 1
    died(tmp_path)
    assert {one.severity for one in find(RunReport(of_run, directory=tmp_path))} <= {"note"}


def test_a_launcher_that_has_seen_the_end_of_the_run_has_seen_all_ends(tmp_path: Path) -> None:
    outcome = RunOutcome("rank 0 failed (exit code 1)", 0, None, (RankOutcome(0, 1, stopped=False),))
    titles = [
        one.title for one in find(RunReport(rings(), directory=tmp_path, outcome=outcome)) if one.severity == "error"
    ]
    assert titles == ["Rank 0 failed (exit code 1)"]


def test_nobody_waits_when_all_members_have_died(tmp_path: Path) -> None:
    for ring in rings():
        collective = {"group": "view", "ordinal": 9, "seq": 9, "op": "all_reduce", "rank": ring.rank // 2}
        waits = [
            made(50 + n, (120 + n) * MS, kind, **collective)
            for n, kind in enumerate((K.COLLECTIVE_SUBMITTED, K.COLLECTIVE_WAITED))
        ]
        write_ring(tmp_path, replace(ring, records=ring.records + waits))
    watch = HangWatch(RunFollower(tmp_path), deadline=0.0)
    assert watch.check() == []
    assert watch.waiting is not None
    watch.run.close()


def test_goodput_is_that_of_the_time_which_all_rings_have() -> None:
    first, second, third = rings()
    kept = [r for r in first.records if r.time >= 90 * MS]
    report = RunReport([replace(first, records=kept, lost=7), second, third])
    assert report.elastic is not None
    assert report.elastic.goodput == 1.0


def test_damaged_lines_and_injected_faults(tmp_path: Path) -> None:
    died(tmp_path)
    record_fault(tmp_path / FILE, member="m-0", kind="slow", place="vote", when="before", step=7, epoch=0)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1, "member": "m-0"}\n[]\n{"time": "x"')
    assert [fault.text for fault in read_faults(tmp_path)] == [
        "rank 1 (m-1) died: killed by SIGKILL",
        "injected fault: slow at vote of step 7 on m-0",
    ]
    clear_run(tmp_path)
    assert read_faults(tmp_path) == []


def test_a_trace_has_views_and_faults(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(
        json.dumps({"time": 1.8e9 + 0.04, "member": "m-1", "kind": "died", "text": "m-1 died"})
    )
    made_up = rings()
    views = [
        (e["pid"], e["name"], e["ts"], e["dur"])
        for e in trace_events(made_up)
        if "view" in e["name"] and e["ph"] == "X"
    ]
    assert views[:3] == [
        (0, "view 0: rank 0 of 2", 0, 60e3),
        (0, "view 1: rank 0 of 1", 60e3, 30e3),
        (0, "view 2: rank 0 of 2", 90e3, 20e3),
    ]
    [mark] = fault_events(tmp_path, made_up)
    assert (mark["pid"], mark["name"], round(mark["ts"])) == (1, "m-1 died", 40_000)

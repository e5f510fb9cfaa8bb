"""A run that is watched: stragglers, lines of figures, the last warning."""

import math
import os
import time

import pytest

from gradwire.observe import run_status as monitor_module
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.observe.rings.run_follower import RunFollower
from gradwire.observe.run_status import Condition, RunMonitor
from gradwire.observe.stragglers.steps import Phase
from gradwire.recorder.format import RecordKind as K
from gradwire.runtime.host import ProcessState, clock_identity
from helpers.made_rings import header
from helpers.made_steps import made_steps, write_rings

WAITED = K.COLLECTIVE_WAITED
SLOW = {(1, Phase.DATA): 1.0}


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves on, for the monitor."""

    class Clock:
        now = time.monotonic()

    monkeypatch.setattr(monitor_module.time, "monotonic", lambda: Clock.now)
    return Clock


@pytest.fixture
def watched(tmp_path):
    """Makes a monitor of 4 ranks whose rings are in `tmp_path`."""
    made = []

    def make(**options):
        made.append(RunMonitor(RunFollower(tmp_path), size=4, **options))
        return made[-1]

    yield make
    for monitor in made:
        monitor.run.close()


def test_stragglers_and_figures(tmp_path, watched, clock):
    monitor = watched(stats=5.0)
    assert monitor.check_if_due() == []  # nobody has begun
    assert monitor.status().begun == 0
    rows = made_steps(4, 40, SLOW)
    write_rings(tmp_path, {rank: row[:30] for rank, row in rows.items()}, size=4)
    clock.now += 1.1
    assert monitor.is_due()
    assert monitor.check_if_due() == []  # it may be a hiccup
    assert monitor.check_if_due() == []  # not due
    for path in tmp_path.glob("rank-*"):
        path.unlink()
    write_rings(tmp_path, rows, size=4)
    clock.now += 2.1
    lines = monitor.check_if_due()
    assert [line.split(" (")[0] for line in lines[:1]] == ["rank 1 is slow in data"]
    assert lines[1].startswith("  without rank 1 a step takes ")
    status = monitor.status()
    assert [rank.is_slow for rank in status.ranks] == [False, True, False, False]
    assert status.warning == lines[0]
    assert status.slowest is status.ranks[1]
    clock.now += 2.0
    [line] = monitor.check_if_due()
    assert "last warning: rank 1 is slow in data" in line
    [line] = monitor.figures(monitor.status())
    assert "last warning" not in line  # once is enough
    assert monitor.next_look == pytest.approx(clock.now + monitor_module.PERIOD)
    for rank in monitor.run.local_ranks:
        rank.descriptions = {"end": [{}]}
    clock.now += 6.0
    assert monitor.check_if_due() == []  # programs that end make no steps


def test_a_line_of_figures_is_not_repeated_while_nothing_changes(watched):
    monitor = watched()
    assert [monitor.figures(monitor.status()) for _ in range(2)] == [["0 of 4 ranks recorded so far"], []]


def test_a_run_that_is_over(tmp_path, watched):
    write_rings(tmp_path, made_steps(4, 30), size=4, pid=2**22 + 1)  # no process has this number
    monitor = watched()
    monitor.check()
    bad = {"step": 5, "rank": 0, "parameter": "weight", "nan": True}
    descriptions = {"end": [{"time": 1}], "nonfinite": [bad]}
    monitor.run.ranks[0].descriptions = descriptions
    status = monitor.status()
    assert {rank.condition for rank in status.ranks} == {Condition.ENDED}
    assert [rank.doing for rank in status.ranks] == ["", "gone", "gone", "gone"]  # the others were killed
    assert monitor.at_end()[0].startswith("In step 5 the gradient of weight was NaN on rank 0. --nonfinite raise ends")


def test_the_rank_that_others_wait_for(tmp_path, watched, record):
    group = {"op": "all_reduce", "group": "world", "seq": 9, "ordinal": 9}
    monitor = watched()
    for number in range(4):
        rank = monitor.run.ranks[number] = RankProgress(
            number, header(number, 4, clock=clock_identity(), pid=os.getpid())
        )
        rank.update([record(K.GROUP, 0, group="world", rank=number, nbytes=4)])
        if number != 2:
            began = time.monotonic_ns() - 3 * 10**9
            rank.update([record(kind, began, rank=number, **group) for kind in (K.COLLECTIVE_SUBMITTED, WAITED)])
    status = monitor.status()
    assert status.missing == (2,)
    assert [rank.doing for rank in status.ranks] == ["3 s in all_reduce"] * 2 + ["", "3 s in all_reduce"]
    monitor.run.state = lambda rank: ProcessState.STOPPED
    assert {rank.condition for rank in monitor.status().ranks} == {Condition.STOPPED}


def test_what_others_have_found_is_the_last_warning(watched):
    monitor = watched()
    monitor.note([])
    assert monitor.status().warning == ""
    monitor.note(["ranks 0, 2 have waited for 5.5 s", "more of it"])
    assert monitor.status().warning == "ranks 0, 2 have waited for 5.5 s"


def test_an_error_ends_the_monitor_and_not_the_run(watched, monkeypatch):
    monitor = watched()
    monkeypatch.setattr(monitor.run, "look", lambda: 1 / 0)
    assert monitor.check_if_due() == ["the run is not watched any more: ZeroDivisionError: division by zero"]
    assert monitor.check_if_due() == []
    assert monitor.next_look == math.inf

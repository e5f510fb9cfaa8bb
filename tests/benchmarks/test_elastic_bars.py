"""What elastic runs promise, measured: `python -m pytest -m acceptance tests/benchmarks/test_elastic_bars.py`, on idle cores."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import IN_A_CHANGE, IN_A_STEP
from benchmarks.faults_run import CommitLine, FaultsRun, Launch, check, left_over
from gradwire.elasticity.leases import LEASE
from gradwire.elasticity.run_records import launcher_of
from helpers.waiting import wait_for_exit, wait_until

pytestmark = pytest.mark.acceptance
PACE = 0.01
"""Seconds of a step at least: a test has time to see what happens."""


@contextmanager
def training(
    folder: Path, start: Launch, *words: str, ranks: int, least: int = 1, **options: Any
) -> Iterator[FaultsRun]:
    with FaultsRun(folder, {"pace": PACE, **options}, *words, ranks=ranks, start=start, least=least) as run:
        run.wait_for_members(ranks)
        yield run
        assert run.end() == 0, run.said()
    assert not left_over(folder)


def show(what: str, waits: list[float], bar: float) -> None:
    """Print the figures. On a busy machine they may miss the bar."""
    late = sum(wait > bar for wait in waits)
    numbers = f"{len(waits)}, median {statistics.median(waits):.3f} s, at most {max(waits):.3f} s"
    print(f"{what}: {numbers}, {late} above {bar:g} s", flush=True)
    assert not late


def longest(commits: list[CommitLine], since: float, until: float) -> float:
    """The longest time without a commit."""
    times = [since, *sorted(line.time for line in commits if since < line.time < until), until]
    return max(b - a for a, b in itertools.pairwise(times))


def kill_a_member(run: FaultsRun, draw: random.Random) -> Callable[[], float]:
    """Kill one; returns a function that waits until all train again, and says when the first of the others had committed."""
    member, epoch = draw.choice(run.members()), run.commits[-1].epoch
    os.kill(run.pids[member], signal.SIGKILL)

    def went_on() -> float:
        first = run.wait(lambda: [line.time for line in run.commits if line.epoch > epoch], "another view")
        run.wait_for_members(run.ranks, since=first[0])
        return min(first)

    return went_on


@pytest.mark.parametrize(("how", "times"), [("killed", 100), ("stopped", 20)])
def test_a_hub_that_is_away_stops_nobody(how: str, times: int, tmp_path: Path, start: Launch) -> None:
    """Commits go on while it is, and members change within a second after."""
    draw, gaps, changes = random.Random(1), [], []
    with training(tmp_path, start, ranks=3) as run:
        for number in range(times):
            hub, began = run.hub(), time.time()
            os.kill(hub, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            if how == "killed":
                run.wait(lambda hub=hub: run.hub() != hub, "another hub")  # type: ignore[misc]
            else:
                time.sleep(5.0)  # the fault
            back = time.time()
            gaps.append(longest(run.commits, began, back))
            if number % 2 == 0:
                went_on = kill_a_member(run, draw)
            if how == "stopped":
                back = time.time()
                os.kill(hub, signal.SIGCONT)
            if number % 2:
                went_on = kill_a_member(run, draw)
            changes.append(went_on() - back)
        assert {line.epoch for line in run.commits} >= {times}
    assert check(run.commits).faultless
    show(f"the longest time without a commit while the hub was {how}", gaps, 1.0)
    show("from its return to the first commit of other members", changes, 1.0)


def test_sigterm_at_any_time_loses_nothing(tmp_path: Path, start: Launch) -> None:
    """A hundred members leave. What the averages count and what is still owed are all samples of all steps."""
    draw, waits, told = random.Random(2), [], set[int]()
    with training(tmp_path, start, ranks=4, least=4, owing=True) as run:
        for _ in range(100):
            time.sleep(draw.uniform(0, 0.3))
            pid = draw.choice([pid for member, pid in run.pids.items() if pid not in told])
            told.add(pid)
            began = time.time()
            os.kill(pid, signal.SIGTERM)
            wait_for_exit(pid)
            waits.append(time.time() - began)
            if draw.random() < 0.7:  # the next one leaves while members change, otherwise
                run.wait_for_members(4, since=began)
        run.wait_for_members(4, since=time.time())
    steps = {line.step: float(line.samples) for line in run.commits}
    ends = run.read("ends")
    owed = sum(owed for *_, owed in ends)
    said = run.said()
    print(f"{len(steps)} steps, {sum(steps.values()):g} counted and {owed:g} owed, of {64 * len(steps)}")
    assert said.count("has left") == 100, said
    assert "0 ranks died" in said
    assert sum(steps.values()) + owed == 64 * len(steps)
    show("from SIGTERM to the end of the process", waits, 5.0)


@pytest.mark.parametrize("joined", [0, 2])
def test_a_rank_that_holds_the_gil_is_not_evicted(joined: int, tmp_path: Path, start: Launch) -> None:
    """Nor are those of two launchers, of which the hub hears in time: five ranks hold it at once, four times."""
    key = str(tmp_path / "key")
    with FaultsRun(
        tmp_path, {"pace": PACE, "hold": 10.0}, "--key-file", key, ranks=5 - joined, most=5, start=start
    ) as run:
        if joined:
            run.wait_for_members(3)
            run.join(joined, key)
        run.wait_for_members(5)
        for _ in range(4):
            before, members = run.commits[-1], run.members()
            holding = [tmp_path / f"hold {run.pids[member]}" for member in members]
            for file in holding:
                file.touch()
            wait_until(lambda files=holding: not any(file.exists() for file in files), "all hold it")  # type: ignore[misc]
            began = time.time()
            run.wait_for_members(5, since=began + LEASE)
            assert time.time() - began > 2 * LEASE
            assert run.commits[-1].epoch == before.epoch
            assert run.members() == members
        assert run.end() == 0, run.said()
    assert check(run.commits).faultless


FAULTS = 50
"""In each of four phases: 8, 3, 6, and again 8 members; before the last, there is one for a while."""


def leave(run: FaultsRun, members: int, number: int) -> None:
    """Let so many of the members leave, those of other launchers first: with the last of its own a launcher ends. One that dies
    instead is replaced, and another one leaves. None leaves before all are there: it may be the only one that others have left."""
    first = launcher_of(run.commits[0].member)
    for present in range(members, members - number, -1):
        left = False
        while not left:
            run.wait_for_members(present, since=time.time())
            member = max(run.members(), key=lambda one: (launcher_of(one) != first, one))
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pids[member], signal.SIGTERM)
            run.wait(lambda one=member: f"({one}) " in run.said(), f"the end of {member}")  # type: ignore[misc]
            left = f"({member}) has left" in run.said()


def test_members_that_change_and_die_train_what_one_process_trains(tmp_path: Path, start: Launch) -> None:
    """Bit for bit: sums of these gradients are exact. Ranks of three launchers, which share the run."""
    rate = {**{place: 5 * rate for place, rate in IN_A_STEP.items()}, **IN_A_CHANGE}
    (tmp_path / "faults").mkdir()
    key = str(tmp_path / "key")
    options = {"exact": True, "rate": rate, "least": 2}  # one other may be leaving
    with FaultsRun(tmp_path / "faults", options, "--key-file", key, ranks=8, start=start) as run:
        for number, change in enumerate([lambda: None, lambda: leave(run, 8, 5), lambda: run.join(3, key)], 1):
            change()
            run.wait(lambda number=number: len(run.read("faults")) >= number * FAULTS, "faults", 400.0)  # type: ignore[misc]
        leave(run, 6, 5)
        run.wait_for_members(1)
        run.wait_for_steps(20)
        run.join(7, key)
        run.wait_for_members(8)
        run.wait(lambda: len(run.read("faults")) >= 4 * FAULTS, "faults", 400.0)
        assert run.end() == 0, run.said()
    assert not left_over(tmp_path / "faults")
    views = {line.epoch: line.members for line in run.commits}
    print(
        check(run.commits),
        f"{len(views)} views, of {Counter(views.values())} members; {len(run.read('faults'))} faults",
    )
    assert check(run.commits).faultless
    assert {8, 3, 6, 1} <= set(views.values())
    with FaultsRun(tmp_path, {"exact": True}, ranks=1, start=start) as alone:
        alone.end(run.commits[-1].step + 1)
    assert {line.step: line.digest for line in alone.commits} == {line.step: line.digest for line in run.commits}

"""Stragglers of a run that goes on, and of one that was recorded."""

import pytest

from gradwire import observe
from gradwire.errors import UsageError
from gradwire.observe.stragglers.detect import WINDOW, StragglerWatch, slow_ranks, stragglers_over_time
from gradwire.observe.stragglers.steps import Phase
from helpers.made_steps import made_steps, write_rings

SLOW = {(3, Phase.DATA): 0.5}


def watched(watch, rows, seconds):
    """What is said when a step takes 0.1 s and the watch checks after every step. `rows` have all steps."""
    lines = []
    count = len(rows[0])
    for done in range(1, count + 1):
        now = seconds + done * 0.1
        lines += [(done, line) for line in watch.check({rank: row[:done] for rank, row in rows.items()}, now)]
    return lines


def test_a_straggler_is_reported_once():
    watch = StragglerWatch()
    lines = watched(watch, made_steps(8, 200, SLOW), 0.0)
    assert len(lines) == 2
    assert lines[0][1].startswith("rank 3 is slow in data")
    assert 40 <= lines[0][0] <= 60  # 20 steps, and 2 seconds of doubt
    assert [one.rank for one in watch.current] == [3]


def test_nothing_is_reported_of_a_hiccup():
    rows, slow = made_steps(8, 100), made_steps(8, 100, SLOW)
    rows = {rank: [*rows[rank][:30], *slow[rank][30:51], *rows[rank][51:]] for rank in rows}
    assert watched(StragglerWatch(), rows, 0.0) == []


def test_long_steps_of_varying_length_are_no_stragglers():
    """Windows in which a rank happens to be slow are among the first hundreds already."""
    rows, watch, by_chance = made_steps(2, 500, jitter=0.3, seed=7), StragglerWatch(), 0
    for done in range(WINDOW, 500):
        window = {rank: row[done - WINDOW : done] for rank, row in rows.items()}
        by_chance += bool(slow_ranks(window))
        assert watch.check(window, float(done)) == []
    assert by_chance > 5
    assert stragglers_over_time(rows) == []


def test_a_change_is_reported():
    first, second = made_steps(8, 100, SLOW), made_steps(8, 300, {(3, Phase.BACKWARD): 0.5})
    lines = watched(StragglerWatch(), {rank: [*first[rank], *second[rank][100:]] for rank in first}, 0.0)
    assert [line.partition(" (")[0] for _, line in lines if line.startswith("rank")] == [
        "rank 3 is slow in data",
        "rank 3 is slow in backward",
    ]


def test_a_rank_that_recovers_is_mentioned_once():
    slow, healthy = made_steps(8, 100, SLOW), made_steps(8, 300)
    watch = StragglerWatch()
    lines = watched(watch, {rank: [*slow[rank], *healthy[rank][100:]] for rank in slow}, 0.0)
    assert [line for _, line in lines if "again" in line] == [lines[-1][1]]
    assert lines[-1][1].startswith("rank 3 is as fast as the others again (step 1")
    assert watch.current == []


@pytest.fixture
def run(tmp_path):
    """Writes the rings of 4 ranks with made-up steps."""

    def write(extra):
        write_rings(tmp_path, made_steps(4, 40, extra), size=4)
        return tmp_path

    return write


def test_the_stragglers_of_a_recorded_run(run):
    [found] = observe.find_stragglers(run({(1, Phase.FORWARD): 0.4}))
    assert (found.rank, found.phase, found.first_step, found.last_step) == (1, Phase.FORWARD, 1, 40)
    assert found.without < found.step_seconds


def test_a_recorded_run_without_stragglers(run):
    assert observe.find_stragglers(run({})) == []


def test_a_directory_without_rings_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no flight recorder has written here"):
        observe.find_stragglers(tmp_path)

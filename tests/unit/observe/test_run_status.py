"""The figures of a run."""

from dataclasses import replace

import pytest

from gradwire.observe.run_status import Condition, RankStatus, run_status, stats_line
from gradwire.observe.stragglers.steps import Phase
from helpers.made_steps import MS, made_steps


def facts(rows, *, slow=(), **conditions):
    """What is known of the ranks, and their steps."""
    known = []
    for rank, row in rows.items():
        condition = conditions.get(f"rank{rank}", Condition.RUNS if row else Condition.STARTING)
        known.append(
            RankStatus(rank, condition, doing="forward", is_slow=rank in slow, step=row[-1].step if row else -1)
        )
    return known, rows


def test_all_ranks_train():
    rows = made_steps(4, 30, {(2, Phase.DATA): 1.0}, jitter=0.001)
    status = run_status(*facts(rows, slow={2}), size=4, now=rows[0][-1].end + 500 * MS)
    assert [rank.rank for rank in status.ranks] == [0, 1, 2, 3]
    assert all(rank.condition is Condition.RUNS for rank in status.ranks)
    assert status.step == 30
    assert status.idle == pytest.approx(0.5)
    assert status.seconds == pytest.approx(status.compute + status.exposed)
    assert status.steps_per_second == pytest.approx(1 / status.seconds)
    assert status.nbytes == 1000
    assert status.slowest is status.ranks[2]
    assert status.slowest.is_slow
    assert status.slowest.late == pytest.approx(0.03, rel=0.3)
    assert status.slowest.compute > status.ranks[0].compute
    assert status.slowest.exposed < status.ranks[0].exposed
    line = stats_line(status)
    assert line.startswith("step 30, ")
    assert " ms a step (compute " in line
    assert ", 1000 B a step, slowest rank 2 (" in line
    assert "samples" not in line


def test_figures_that_are_not_recorded_are_left_out():
    """Of torch's own DDP nothing records when ranks only wait, and how many bytes they send."""
    rows = {rank: [replace(one, backward_waits=True) for one in row] for rank, row in made_steps(2, 20).items()}
    line = stats_line(run_status(*facts(rows), size=2, now=rows[0][-1].end))
    assert " ms a step" in line
    assert "exposed" not in line
    assert " B a step" not in line


def test_only_the_steps_of_the_interval_count():
    rows = made_steps(2, 30)
    since = rows[0][19].end
    status = run_status(*facts(rows), size=2, now=rows[0][-1].end, since=since)
    last = rows[0][20:]
    assert status.ranks[0].seconds == pytest.approx(sum(one.seconds for one in last) / 10)
    nothing = run_status(*facts(rows), size=2, now=since + 9 * 10**9, since=rows[0][-1].end)
    assert nothing.seconds == 0
    assert stats_line(nothing).startswith("step 30, no step for ")


def test_samples_of_all_ranks_are_added():
    rows = {rank: [replace(one, samples=32) for one in row] for rank, row in made_steps(4, 20).items()}
    status = run_status(*facts(rows), size=4, now=rows[0][-1].end)
    assert status.samples_per_second == pytest.approx(4 * 32 / status.ranks[0].seconds, rel=0.01)
    assert f"{status.samples_per_second:,.0f} samples/s" in stats_line(status)


def test_ranks_that_have_not_begun_or_have_ended():
    rows = made_steps(2, 20)
    status = run_status(*facts({0: rows[0], 2: []}, rank0=Condition.ENDED), size=4, now=0)
    status = replace(status, warning="look out")
    conditions = [rank.condition for rank in status.ranks]
    assert conditions == [Condition.ENDED, Condition.ABSENT, Condition.STARTING, Condition.ABSENT]
    assert status.begun == 2
    line = stats_line(status)
    assert line.startswith("step 20, ")
    assert line.endswith(", 2 of 4 ranks recorded so far, 1 rank ended or stopped; last warning: look out")
    stopped = run_status(*facts(rows, rank1=Condition.STOPPED), size=2, now=rows[0][-1].end)
    assert stopped.ranks[1].condition is Condition.STOPPED
    assert "1 rank ended or stopped" in stats_line(stopped)


def test_how_the_run_has_ended():
    rows = made_steps(2, 20)
    gone = facts(rows, rank0=Condition.ENDED, rank1=Condition.ENDED)
    for known, words in ((gone, "exposed"), (facts({0: []}, rank0=Condition.ENDED), "1 of 2 ranks recorded, rank 1")):
        line = stats_line(replace(run_status(*known, size=2, now=0), ending="rank 1 failed first"))
        assert words in line
        assert line.endswith(", rank 1 failed first")
        assert "ended" not in line


def test_nothing_yet():
    assert stats_line(run_status([], {}, size=2, now=0)) == "0 of 2 ranks recorded so far"
    assert stats_line(run_status(*facts({0: [], 1: []}), size=2, now=0)) == "no step yet"
    untimed = RankStatus(0, Condition.STARTING, step=15)
    assert stats_line(run_status([untimed], {0: []}, size=1, now=0)) == "step 15, without step times"
    alone = run_status(*facts({0: made_steps(1, 3)[0]}), size=1, now=0)
    assert alone.slowest is None
    assert stats_line(alone).startswith("step 3, ")

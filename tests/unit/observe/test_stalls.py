"""Hangs of scripts that keep torch's DDP: which ranks wait, and which one they wait for."""

import pytest

from gradwire.observe.hangs.analysis import Cause
from gradwire.observe.hangs.hang_report import report_lines
from gradwire.observe.hangs.hang_watch import find_stall, idle_seconds
from gradwire.observe.hangs.stacks import Frame
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.recorder.format import RecordKind as K
from gradwire.runtime.host import ProcessState

S = 1_000_000_000
USER = Frame("/home/me/train.py", 31, "save")
LOOP = Frame("/home/me/train.py", 40, "<module>")
ENGINE = Frame("/lib/torch/autograd/graph.py", 9, "_engine_run_backward")
BARRIER = Frame("/lib/torch/distributed/distributed_c10d.py", 9, "barrier")
LOADER = Frame("/lib/torch/utils/data/dataloader.py", 9, "__next__")


@pytest.fixture
def rank(record):
    """A rank with a step every second, until `end`."""

    def make(number, *, end=10, every=1):
        progress = RankProgress(number, {"pid": 100 + number, "libraries": ["/lib/"]})
        progress.update(
            [record(K.FORWARD_BEGAN, t * S, rank=number, step=step) for step, t in enumerate(range(0, end + 1, every))]
        )
        return progress

    return make


@pytest.mark.parametrize(
    ("now", "deadline", "idle"), [(19, 5.0, None), (21, 5.0, 11.0), (21, 12.0, None), (10, 0.0, None)]
)
def test_ranks_are_idle_after_ten_steps_time(rank, now, deadline, idle):
    assert idle_seconds([rank(0), rank(1, end=9)], now * S, deadline=deadline) == idle


def test_ranks_with_groups_of_their_own_are_left_to_the_collectives(rank, record):
    ranks = [rank(0), rank(1)]
    ranks[0].update([record(K.GROUP, 0, group="world", nbytes=2)])
    assert idle_seconds(ranks, 60 * S) is None
    assert idle_seconds([rank(0), RankProgress(1, {})], 60 * S) is None
    assert idle_seconds([rank(0)], 60 * S) is None


def stall_of(ranks, stacks, states=None):
    return find_stall(
        ranks,
        11.0,
        state=lambda rank: (states or {}).get(rank.rank, ProcessState.SLEEPING),
        stacks={number: [frames] if frames else [] for number, frames in stacks.items()},
    )


@pytest.mark.parametrize(
    ("frames", "state", "cause", "where"),
    [
        ((USER, LOOP), ProcessState.RUNNING, Cause.USER_CODE, USER),
        ((LOADER, LOOP), ProcessState.SLEEPING, Cause.DATA_LOADER, LOOP),
        ((), ProcessState.STOPPED, Cause.STOPPED, None),
        ((), ProcessState.GONE, Cause.DEAD, None),
        ((USER, ENGINE, LOOP), ProcessState.RUNNING, Cause.USER_CODE, USER),  # a hook in backward
    ],
)
def test_the_rank_that_stands_elsewhere_is_named(rank, frames, state, cause, where):
    ranks = [rank(n) for n in range(3)]
    found = stall_of(ranks, {0: (ENGINE, LOOP), 1: frames, 2: (BARRIER, LOOP)}, {1: state})
    assert found is not None
    stall, [suspect] = found
    assert (stall.ranks, stall.where) == ((0, 2), LOOP)
    assert (suspect.rank, suspect.cause, suspect.where) == (1, cause, where)
    lines = report_lines(stall, [suspect])
    assert lines[0].startswith("ranks 0, 2 have waited for 11.0 s in step 10, in <module>() at /home/me/train.py:40")
    assert cause.value in lines[1]


@pytest.mark.parametrize("frames", [(ENGINE, LOOP), (USER, LOOP)])
def test_nothing_is_reported_if_all_ranks_do_the_same(rank, frames):
    assert stall_of([rank(0), rank(1)], {0: frames, 1: frames}) is None


def test_the_member_without_which_there_is_no_view_is_named(rank, record):
    ranks = [rank(n) for n in range(3)]
    for one in ranks:
        one.header = {**one.header, "member": f"m-{one.rank + 5}"}
        one.update([record(K.VIEW, 10 * S, rank=one.rank, group="view 1", nbytes=3)])
    assert idle_seconds(ranks, 60 * S) == 50.0
    settle = Frame("/lib/gradwire/elasticity/performer.py", 9, "settle")
    found = stall_of(ranks, {0: (settle, LOOP), 1: (USER, LOOP), 2: (settle, LOOP)})
    assert found is not None
    first, second, *_ = report_lines(found[0], found[1])
    assert first.startswith("ranks 0, 2 have waited for 11.0 s in step 10, in <module>() at /home/me/train.py:40")
    assert first.endswith("(in a change of members)")
    assert "rank 1 (process m-6 101, sleeping): it is in user code" in second

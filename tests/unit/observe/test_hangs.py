"""Which rank is to blame for a hang: a table of situations."""

from dataclasses import replace

import pytest

from gradwire.observe.hangs.analysis import Cause, find_suspects, find_waiting
from gradwire.observe.hangs.gradient_questions import Awaited
from gradwire.observe.hangs.hang_report import report_lines, standing
from gradwire.observe.hangs.stacks import Frame
from gradwire.observe.rings.rank_progress import RankProgress
from gradwire.recorder.format import RecordKind as K
from gradwire.runtime.host import ProcessState
from helpers.recorder_put import group_id_of

S = 1_000_000_000
WAITED = K.COLLECTIVE_WAITED
LIBRARIES = ["/lib/", "/src/gradwire/"]


@pytest.fixture
def rank(record):
    """A rank of a group of three that has finished collectives 1 to `finished`, and has submitted those in `pending`."""

    def make(
        number,
        *,
        finished=0,
        pending=(),
        took=S // 100,
        op="all_reduce",
        nbytes=4,
        group="world",
        at=0,
        waits=WAITED,
        model=0,
    ):
        header = {"pid": 100 + number, "process_start": "", "libraries": LIBRARIES}
        progress = RankProgress(number, header)
        progress.update([record(K.GROUP, 0, group=group, rank=number, nbytes=3)])
        facts = {"op": op, "group": group, "rank": number, "nbytes": nbytes}
        for n in range(1, finished + 1):
            progress.update([record(K.COLLECTIVE_FINISHED, at, seq=n, ordinal=n, duration=took, **facts)])
        facts |= {"step": 7, "bucket": 1, "label": "bucket 1", "model": model}
        for n in pending:
            progress.update([record(kind, at, seq=n, ordinal=n, **facts) for kind in (K.COLLECTIVE_SUBMITTED, waits)])
        return progress

    return make


def suspects_of(ranks, waiting, states=None, stacks=None, awaited=None):
    states, stacks = states or {}, stacks or {}
    return find_suspects(
        waiting,
        state=lambda rank: states.get(rank.rank, ProcessState.SLEEPING),
        stacks=lambda asked: {rank.rank: stacks.get(rank.rank, []) for rank in asked},
        ask=None if awaited is None else lambda asked: lambda: {rank.rank: awaited[rank.rank] for rank in asked},
    )


def test_ranks_that_have_not_submitted_it_are_missing(rank):
    ranks = [rank(0, finished=4, pending=[5]), rank(1, finished=4), rank(2, finished=4, pending=[5])]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    assert (waiting.ranks, waiting.missing) == ((0, 2), (1,))
    assert [member.rank for member in waiting.members] == [0, 1, 2]
    assert (waiting.seconds, waiting.record.ordinal) == (6.0, 5)


def test_a_rank_that_has_never_submitted_anything_is_missing(rank):
    waiting = find_waiting([rank(0, pending=[1]), rank(1), rank(2, pending=[1])], 6 * S)
    assert waiting is not None
    assert waiting.missing == (1,)


def test_nothing_can_be_reported_of_a_group_without_a_name_whose_record_was_overwritten(record):
    progress = RankProgress(0, {"pid": 100, "process_start": "", "libraries": []})
    progress.update([record(kind, 0, op="all_reduce", ordinal=1) for kind in (K.COLLECTIVE_SUBMITTED, WAITED)])
    assert find_waiting([progress], 6 * S) is None


@pytest.mark.parametrize(
    ("seconds", "took", "deadline", "found"),
    [
        (4.9, 0.01, 5.0, False),
        (5.1, 0.01, 5.0, True),
        (9.0, 1.0, 5.0, False),  # ten times the usual is 10 s
        (10.1, 1.0, 5.0, True),
        (1.1, 0.01, 1.0, True),
    ],
)
def test_the_deadline_is_the_larger_of_two(rank, seconds, took, deadline, found):
    ranks = [rank(0, finished=3, pending=[4], took=int(took * S)), rank(1, finished=3)]
    assert (find_waiting(ranks, int(seconds * S), deadline=deadline) is not None) == found


def test_a_rank_that_has_come_at_last_has_the_same_time_again(rank):
    """The others have waited for it, not for the network; if nothing happens after that, it is a hang."""
    ranks = [rank(0, pending=[1]), rank(1, pending=[1], at=6 * S), rank(2, pending=[1])]
    assert find_waiting(ranks, int(6.1 * S)) is None
    waiting = find_waiting(ranks, int(11.1 * S))
    assert waiting is not None
    assert (waiting.ranks, waiting.missing) == ((0, 1, 2), ())


def test_nothing_hangs_where_nothing_is_pending(rank):
    assert find_waiting([rank(0, finished=9), rank(1, finished=8)], 1000 * S) is None


def test_groups_of_the_same_name_have_their_own_hangs(rank, record):
    """Two pairs of ranks with groups of one name: each has its own ranks."""
    ranks = [rank(0, pending=[1]), rank(1), rank(2), rank(3)]
    for n, one in enumerate(ranks):
        moved = [r._replace(group_id=7 + n // 2, rank=n % 2, nbytes=2 if r.kind is K.GROUP else 4) for r in one.last]
        ranks[n] = RankProgress(n, one.header)
        ranks[n].update(moved)
    waiting = find_waiting(ranks, 60 * S)
    assert waiting is not None
    assert (waiting.ranks, waiting.missing, waiting.unknown) == ((0,), (1,), 0)


def test_after_many_collectives_the_missing_rank_is_still_named(rank, record):
    """More than 2**24 of them."""
    many = (1 << 24) + 5
    ranks = [rank(0, pending=[many]), rank(1, pending=[many]), rank(2, pending=[many - 1], waits=K.COLLECTIVE_STARTED)]
    waiting = find_waiting(ranks, 60 * S)
    assert waiting is not None
    assert waiting.missing == (2,)


USER = Frame("/home/me/train.py", 31, "spin")
LOADER = Frame("/lib/torch/utils/data/dataloader.py", 9, "__next__")
PUMP = Frame("/src/gradwire/hooks/pump.py", 9, "pump")
WAIT = Frame("/src/gradwire/groups/work.py", 9, "wait")


@pytest.mark.parametrize(
    ("state", "stacks", "cause", "where"),
    [
        (ProcessState.GONE, [], Cause.DEAD, None),
        (ProcessState.STOPPED, [], Cause.STOPPED, None),
        (ProcessState.RUNNING, [(USER,)], Cause.USER_CODE, USER),
        (ProcessState.SLEEPING, [(LOADER, USER)], Cause.DATA_LOADER, USER),
        (ProcessState.SLEEPING, [(USER, PUMP, LOADER)], Cause.HOOK, USER),
        (ProcessState.SLEEPING, [(WAIT, USER), (USER, PUMP)], Cause.HOOK, USER),
        (ProcessState.SLEEPING, [(WAIT, PUMP, USER)], Cause.USER_CODE, USER),
        (ProcessState.SLEEPING, [], Cause.UNKNOWN, None),
    ],
)
def test_what_the_missing_rank_does(rank, state, stacks, cause, where):
    ranks = [rank(0, pending=[1]), rank(1), rank(2, pending=[1])]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    [suspect] = suspects_of(ranks, waiting, {1: state}, {1: stacks})
    assert (suspect.rank, suspect.pid, suspect.cause, suspect.where) == (1, 101, cause, where)
    assert cause.value in "\n".join(report_lines(waiting, [suspect]))


def test_a_rank_that_waits_elsewhere(rank, record):
    ranks = [rank(0, finished=4, pending=[5]), rank(1, finished=4), rank(2, finished=4, pending=[5])]
    facts = {"op": "barrier", "group": "side", "seq": 2, "ordinal": 3, "label": "epoch"}
    ranks[1].update([record(kind, S, **facts) for kind in (K.COLLECTIVE_SUBMITTED, WAITED)])
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    [suspect] = suspects_of(ranks, waiting)
    assert (suspect.rank, suspect.cause) == (1, Cause.OTHER_COLLECTIVE)
    assert "barrier 'epoch' (operation #2 of side" in report_lines(waiting, [suspect])[1]


@pytest.mark.parametrize("at", [0, S // 2])
def test_a_different_collective(rank, at):
    ranks = [rank(0, pending=[1], at=at), rank(1, pending=[1], nbytes=8), rank(2, pending=[1], at=at)]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    assert (waiting.ranks, waiting.missing, waiting.record.nbytes) == ((0, 2), (), 4)
    [suspect] = suspects_of(ranks, waiting)
    assert (suspect.rank, suspect.cause) == (1, Cause.DIFFERENT)
    assert "8 bytes" in report_lines(waiting, [suspect])[1]


def test_a_rank_that_is_stopped_in_the_middle_of_it(rank):
    ranks = [rank(n, pending=[1]) for n in range(3)]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    [suspect] = suspects_of(ranks, waiting, {2: ProcessState.STOPPED})
    assert (suspect.rank, suspect.cause) == (2, Cause.STOPPED)


def test_no_rank_is_to_blame(rank):
    ranks = [rank(n, pending=[1]) for n in range(3)]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    assert suspects_of(ranks, waiting) == []
    assert report_lines(waiting, []) == [
        "ranks 0-2 have waited for 6.0 s in all_reduce 'bucket 1' (operation #1 of world, 4 bytes of step 7, bucket 1)",
        "  all ranks have submitted it: the engine or the link is slow or stuck",
    ]


@pytest.mark.parametrize("op", ["all_reduce", "send"])
def test_no_rank_is_to_blame_but_a_kernel_may_be(rank, op):
    waiting = find_waiting([rank(n, pending=[1]) for n in range(3)], 6 * S)
    assert waiting is not None
    record = waiting.record._replace(op=op, on_device=True, peer=1 if op == "send" else -1)
    line = report_lines(replace(waiting, record=record), [])[1]
    assert "a kernel that was enqueued before it still runs on a rank's GPU, or the engine or the link is slow" in line
    assert ("all ranks have submitted it" in line) == (op == "all_reduce")


def test_a_rank_that_is_not_recorded_may_be_the_one(rank):
    waiting = find_waiting([rank(0, pending=[1]), rank(2, pending=[1])], 6 * S)
    assert waiting is not None
    assert waiting.unknown == 1
    assert report_lines(waiting, [])[1:] == [
        "  1 rank of the group is not recorded here: if on another host, look there too"
    ]


def test_members_are_known_after_the_record_of_the_group_was_overwritten(rank):
    ranks = [rank(0, finished=4, pending=[5]), rank(1, finished=4), rank(2, finished=4, pending=[5])]
    for n, progress in enumerate(ranks):
        fresh = RankProgress(n, progress.header)
        fresh.update(list(progress.last)[1:])
        ranks[n] = fresh
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    assert (waiting.missing, len(waiting.members), waiting.unknown) == ((1,), 3, 0)


def test_a_new_group_of_the_same_name_counts_from_one_again(rank, record):
    ranks = [rank(n, finished=9) for n in range(2)]
    new = {"group": "world", "group_id": 77}
    for n, progress in enumerate(ranks):
        progress.update([record(K.GROUP, 0, rank=n, nbytes=2, **new)])
    assert find_waiting(ranks, 60 * S) is None
    facts = {"op": "barrier", "rank": 0, "seq": 0, "ordinal": 1, **new}
    ranks[0].update([record(kind, 0, **facts) for kind in (K.COLLECTIVE_SUBMITTED, WAITED)])
    waiting = find_waiting(ranks, 60 * S)
    assert waiting is not None
    assert waiting.missing == (1,)


def test_ranks_of_one_process_are_told_apart(rank, record):
    progress = rank(0, pending=[1])
    progress.update([record(K.COLLECTIVE_SUBMITTED, 0, op="all_reduce", group="world", rank=1, seq=1, ordinal=1)])
    progress.update([record(K.COLLECTIVE_FINISHED, 0, op="all_reduce", group="world", rank=0, seq=1, ordinal=1)])
    assert [pending.rank for pending in progress.pending.values()] == [1]


def test_what_runs_in_the_background_is_no_hang(rank):
    """A rank that has submitted early computes; one that waits for it later hangs from then on."""
    ranks = [rank(0, pending=[1], waits=K.COLLECTIVE_STARTED), rank(1), rank(2)]
    assert find_waiting(ranks, 60 * S) is None
    ranks[2] = rank(2, pending=[1], at=58 * S)
    assert find_waiting(ranks, 60 * S) is None
    waiting = find_waiting(ranks, 64 * S)
    assert waiting is not None
    assert (waiting.seconds, waiting.ranks, waiting.missing) == (6.0, (0, 2), (1,))


def test_a_receive_in_the_background_is_not_what_a_rank_does(rank, record):
    ranks = [rank(0, pending=[1]), rank(1), rank(2, pending=[1])]
    ranks[1].update([record(K.COLLECTIVE_SUBMITTED, 0, op="recv", group="world", rank=1, seq=7)])
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    [suspect] = suspects_of(ranks, waiting, stacks={1: [(USER,)]})
    assert suspect.cause is Cause.USER_CODE


def test_ranks_that_are_threads_share_a_ring(rank, record):
    progress = rank(0, pending=[1])
    for number in (1, 2):
        progress.update([record(K.GROUP, 0, group="world", rank=number, nbytes=3)])
    facts = {"op": "all_reduce", "group": "world", "rank": 2, "seq": 1, "ordinal": 1, "nbytes": 4}
    progress.update([record(kind, 0, **facts) for kind in (K.COLLECTIVE_SUBMITTED, WAITED)])
    waiting = find_waiting([progress], 6 * S)
    assert waiting is not None
    assert (waiting.ranks, waiting.missing, waiting.unknown) == ((0, 2), (1,), 0)
    [suspect] = suspects_of([progress], waiting, stacks={0: [(WAIT, USER), (USER,)]})
    assert (suspect.rank, suspect.pid, suspect.cause, suspect.stack) == (1, 100, Cause.USER_CODE, (USER,))


def test_the_bucket_that_is_not_full_and_its_parameters(rank, record):
    """Two models over one group: the other one's buckets have the same sizes."""
    ranks = [rank(0, pending=[1], model=2), rank(1), rank(2, pending=[1], model=2)]
    facts = {"group": "world", "bucket": 1, "nbytes": 24, "model": 2}
    ranks[0].update([record(K.BUCKET_FULL, 0, step=7, **facts)])
    world = {"group": "world", "group_id": group_id_of("world")}
    other = {**world, "model": 1, "buckets": [{"bytes": 8, "names": ["a"]}, {"bytes": 24, "names": ["b"]}]}
    mine = {**other, "model": 2, "buckets": [other["buckets"][0], {"bytes": 24, "names": ["fc.weight", "fc.bias"]}]}
    ranks[0].descriptions = {"buckets": [mine, other]}
    ranks[1].update([record(K.BUCKET_FULL, 0, step=7, rank=1, **{**facts, "model": 1})])  # of the other model
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    [suspect] = suspects_of(ranks, waiting)
    assert (suspect.bucket, suspect.parameters, suspect.certain) == (1, ("fc.weight", "fc.bias"), False)
    line = "      bucket 1 is not full there: it has no gradient yet of"
    assert f"{line} one of fc.weight, fc.bias" in report_lines(waiting, [suspect])

    def awaits(*names, step=7, bucket=1, model=2):
        return suspects_of(ranks, waiting, awaited={1: [Awaited(group_id_of("world"), model, 1, step, bucket, names)]})

    [suspect] = awaits("fc.bias")
    assert (suspect.parameters, suspect.certain) == (("fc.bias",), True)
    assert f"{line} fc.bias" in report_lines(waiting, [suspect])
    [suspect] = awaits()
    there = "      bucket 1 has all its gradients there: it is sent when backward goes on"
    assert there in report_lines(waiting, [suspect])
    for other in (
        awaits("fc.bias", step=8),
        awaits("fc.bias", bucket=0),
        awaits("b", model=1),
    ):  # it has continued in the meantime
        assert not other[0].certain
    ranks[1].update([record(K.FORWARD_BEGAN, 0, group="world", rank=1, step=7)])
    [suspect] = suspects_of(ranks, waiting, awaited={})  # known without asking: no backward has begun
    assert (suspect.parameters, suspect.certain) == (("fc.weight", "fc.bias"), True)
    assert f"{line} fc.weight, fc.bias" in report_lines(waiting, [suspect])
    ranks[1].update([record(K.BUCKET_FULL, 0, step=7, rank=1, **facts)])  # it is in the hook
    [suspect] = suspects_of(ranks, waiting)
    assert (suspect.bucket, suspect.parameters) == (-1, ())


def test_ranks_at_the_same_place_are_named_together(rank):
    ranks = [rank(0, pending=[1]), rank(1), rank(2)]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    found = suspects_of(ranks, waiting, stacks={n: [(USER,)] for n in (1, 2)})
    assert report_lines(waiting, found)[1:] == [
        "  ranks 1, 2 (processes 101, 102, sleeping): it is in user code: spin() at /home/me/train.py:31",
        "      bucket 1 is not full there",
        "      spin() at /home/me/train.py:31",
    ]


@pytest.mark.parametrize(("kind", "how"), [(K.COLLECTIVE_FAILED, "failed"), (K.COLLECTIVE_FINISHED, "finished")])
def test_an_operation_that_has_ended_is_not_in_the_background(rank, record, kind, how):
    progress = rank(0, pending=[1], waits=K.COLLECTIVE_STARTED)
    assert "(operation #1 of world, 4 bytes of step 7, bucket 1) in the background for 2.0 s" in standing(
        progress, ProcessState.SLEEPING, 2 * S
    )
    facts = {"op": "all_reduce", "group": "world", "rank": 0, "seq": 1, "ordinal": 1}
    for later in ((), (WAITED,)):  # a caller may ask for it afterwards
        progress.update([record(one, S, **facts) for one in (kind, *later)])
        text = standing(progress, ProcessState.SLEEPING, 2 * S)
        assert text.endswith(f"last all_reduce (operation #1 of world) {how} 1.0 s ago"), text


def test_after_the_end_what_has_failed_counts(rank, record):
    ranks = [rank(0, pending=[1]), rank(1), rank(2, pending=[1])]
    for n in (0, 2):
        facts = {"op": "all_reduce", "group": "world", "rank": n, "seq": 1, "ordinal": 1}
        ranks[n].update([record(K.COLLECTIVE_FAILED, S, **facts)])
    assert find_waiting(ranks, 2 * S, deadline=0.0) is None
    waiting = find_waiting(ranks, 2 * S, deadline=0.0, failed=True)
    assert waiting is not None
    assert (waiting.ranks, waiting.missing) == ((0, 2), (1,))


@pytest.fixture
def message(record):
    """A rank of a group of three that has submitted a send or a receive; and waits for it, unless `waits` is False."""

    def make(number, op, peer, *, count=0, waits=True, at=0):
        progress = RankProgress(number, {"pid": 100 + number, "process_start": "", "libraries": LIBRARIES})
        progress.update([record(K.GROUP, 0, group="world", rank=number, nbytes=3)])
        if op:
            kinds = (K.COLLECTIVE_SUBMITTED, WAITED) if waits else (K.COLLECTIVE_FINISHED,)
            facts = {"op": op, "group": "world", "rank": number, "nbytes": 8, "seq": 3}
            progress.update([record(kind, at, peer=peer, message=count, **facts) for kind in kinds])
        return progress

    return make


@pytest.mark.parametrize(("op", "words", "other"), [("recv", "from", "send"), ("send", "to", "receive")])
def test_a_message_whose_other_half_was_not_submitted(message, op, words, other):
    ranks = [message(0, "", -1), message(1, op, 0), message(2, "", -1)]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    assert (waiting.ranks, waiting.missing, waiting.unknown) == ((1,), (0,), 0)
    found = suspects_of(ranks, waiting, stacks={0: [(USER,)]})
    assert report_lines(waiting, found)[:3] == [
        f"rank 1 has waited for 6.0 s in {op} (operation #3 of world, 8 bytes {words} rank 0)",
        f"  rank 0 has not submitted the matching {other}",
        "  rank 0 (process 100, sleeping): it is in user code: spin() at /home/me/train.py:31",
    ]
    assert find_waiting(ranks, 4 * S) is None


def test_ranks_that_receive_from_each_other(message):
    ranks = [message(0, "recv", 1, at=S), message(1, "recv", 0), message(2, "", -1)]
    waiting = find_waiting(ranks, 7 * S)
    assert waiting is not None
    assert (waiting.ranks, waiting.missing) == ((1,), (0,))
    [suspect] = suspects_of(ranks, waiting)
    assert suspect.cause is Cause.OTHER_COLLECTIVE
    assert "recv (operation #3 of world, 8 bytes from rank 1)" in report_lines(waiting, [suspect])[2]


def test_a_message_that_was_sent_and_does_not_arrive(message):
    ranks = [message(0, "send", 1, waits=False), message(1, "recv", 0)]
    waiting = find_waiting(ranks, 6 * S)
    assert waiting is not None
    assert (waiting.missing, suspects_of(ranks, waiting)) == ((), [])
    assert report_lines(waiting, [])[1:] == [
        "  the matching send was submitted: the engine or the link is slow or stuck"
    ]
    assert find_waiting([message(0, "send", 1, count=1, waits=False), ranks[1]], 6 * S).missing == (0,)  # another one


def test_a_peer_that_is_not_recorded_here_or_not_known(message):
    waiting = find_waiting([message(1, "recv", 0), message(2, "", -1)], 6 * S)
    assert waiting is not None
    assert (waiting.missing, waiting.unknown) == ((), 1)
    assert "rank 0 of the group is not recorded here" in report_lines(waiting, [])[1]
    assert find_waiting([message(1, "recv", -1), message(0, "", -1)], 6 * S) is None  # from any rank


def test_a_receive_that_has_failed_is_in_the_report_of_its_error_and_not_of_later_ones(message, record):
    ranks = [message(0, "", -1), message(1, "recv", 0)]
    facts = {"op": "recv", "group": "world", "rank": 1, "peer": 0, "message": 0, "seq": 3}
    ranks[1].update([record(K.COLLECTIVE_FAILED, S, **facts)])
    waiting = find_waiting(ranks, 6 * S, deadline=0.0, failed=True)
    assert waiting is not None
    assert (waiting.record.op, waiting.ranks, waiting.missing) == ("recv", (1,), (0,))
    later = {"op": "all_reduce", "group": "world", "rank": 1, "seq": 4, "ordinal": 1}
    ranks[1].update([record(kind, 2 * S, **later) for kind in (K.COLLECTIVE_SUBMITTED, K.COLLECTIVE_FAILED)])
    waiting = find_waiting(ranks, 6 * S, deadline=0.0, failed=True)
    assert waiting is not None
    assert waiting.record.op == "all_reduce"

"""Which failures belong together."""

import pytest

from gradwire.observe.report.rank_summary import RankSummary, find_failures
from gradwire.recorder.format import RecordKind as K
from helpers.made_rings import MS, made_ring, mark


def op(number, label="bucket 0", kind="all_reduce", group="world"):
    return f"{kind}(float32[8], AVG, label={label!r}) (operation #{number} of {group})"


def timeout(rank, number, *, seconds=3, size=3, **more):
    return f"CollectiveTimeout: {op(number, **more)} on rank {rank} of {size}: not finished after {seconds} s."


def failed(number, text, *, at=70 * MS, duration=5 * MS, kind=K.COLLECTIVE_FAILED, **fields):
    """A failure of the operation `number`."""
    place = {"op": "all_reduce", "group": "world", "seq": number, "ordinal": number + 1}
    return mark(100 + number, at, kind, text, **{**place, "duration": duration, **fields})


def ring(rank, *records, size=3):
    return made_ring(rank, range(3), size=size, more=list(records))


def found(*rings):
    return find_failures(map(RankSummary, rings))


def test_of_a_step_with_several_buckets():
    """Over gloo: every bucket of rank 0 times out by itself, and those of rank 2 are aborted, as its step has failed."""
    quoted = "GroupAborted: <world rank 2 of 3, 2 in flight> was aborted: step 4 failed on rank 2 with "
    [failure] = found(
        ring(0, *(failed(n, timeout(0, n, label=f"bucket {n - 13}"), at=(70 + n) * MS, duration=30 * MS) for n in (13, 14, 15)),
             failed(16, timeout(0, 13), at=90 * MS, kind=K.STEP_FAILED, step=4, ordinal=0)),
        ring(2, failed(13, timeout(2, 13, seconds=2.5), at=91 * MS, duration=30 * MS),
             *(failed(n, quoted + timeout(2, 13), at=92 * MS, duration=30 * MS) for n in (14, 15))),
    )  # fmt: skip
    assert failure.ranks == [0, 2]
    assert failure.steps == [4]
    assert failure.first.record.kind is K.COLLECTIVE_FAILED
    assert failure.others == 4
    assert failure.detail == (
        f"CollectiveTimeout: {op(13)} on rank 0 of 3: not finished after 3 s. 4 other operations in flight failed with it."
    )


def test_a_rank_that_was_aborted_is_not_the_cause_of_the_failure():
    text = f"GroupAborted: world on rank 2 of 3: rank 0 aborted: {timeout(0, 5)}"
    for order in (1, -1):
        [failure] = found(*[ring(2, failed(5, text, at=60 * MS)), ring(0, failed(5, timeout(0, 5)))][::order])
        assert failure.first.record.label == timeout(0, 5)
        assert failure.ranks == [0, 2]


@pytest.mark.parametrize("again", [0, 5], ids=["in a new group", "in the same group"])
def test_a_script_that_goes_on_may_fail_again(again):
    first, second = timeout(1, 0, label="weights"), timeout(1, again, label="metrics")
    group = {} if again else {"group_id": 77}
    failures = found(
        ring(0, failed(again, second.replace("rank 1", "rank 0"), at=90 * MS, **group)),
        ring(1, failed(0, first), failed(again, second, at=90 * MS, **group)),
    )
    assert [failure.ranks for failure in failures] == [[1], [0, 1]]  # the first one first


def test_groups_of_threads_have_the_same_name_in_every_process():
    one, other = (timeout(0, 0, label=label, group="threads") for label in ("tokenizer", "evaluation"))
    assert len(found(ring(0, failed(0, one, group_id=7)), ring(1, failed(0, other, group_id=8)))) == 2


def test_threads_of_one_process_fail_each_for_itself():
    one, other = timeout(0, 1, label="a"), timeout(1, 2, label="b")
    assert len(found(ring(0, failed(1, one, rank=0), failed(2, other, rank=1, at=71 * MS)))) == 2


def test_every_receive_has_its_own_peer():
    text = "CollectiveTimeout: recv(float32[4], peer={}, tag=0) (operation #1 of world) on rank {} of 3: late"
    receives = [failed(n, text.format(n, 0), op="recv", ordinal=0, at=(70 + n) * MS) for n in (1, 2)]
    failures = found(ring(0, *receives), ring(2, failed(1, text.format(1, 2).replace("late", "very late"), ordinal=0)))
    assert sorted((failure.ranks, failure.others) for failure in failures) == [([0], 0), ([0], 0), ([2], 0)]


def test_an_abort_belongs_to_the_failure_that_has_caused_it():
    boom = "GroupAborted: world on rank {} of 3: the group was aborted: rank 1 failed: RuntimeError: boom"
    [failure] = found(
        *(ring(rank, failed(5 + rank, boom.format(rank))) for rank in (0, 2)),
        ring(1, failed(6, "RuntimeError: boom", kind=K.STEP_FAILED, ordinal=0)),
    )
    assert failure.ranks == [0, 1, 2]
    assert failure.detail == "RuntimeError: boom"
    alone = found(*(ring(rank, failed(5, boom.format(rank))) for rank in (0, 2)))
    assert [failure.ranks for failure in alone] == [[0, 2]]

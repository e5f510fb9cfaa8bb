"""What each wrapper adds. That none of them takes anything away is shown in conformance/."""

import time

import pytest
import torch

from gradwire.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    GroupAborted,
    HookError,
    NonFiniteGradient,
    UsageError,
)
from gradwire.groups import Deadline, GroupWrapper, Latched, NanCheck, Recording, ThreadGroup, Verified
from gradwire.testing import run_ranks
from helpers.rank_tests import on_ranks


def test_recording_keeps_what_was_submitted_and_how_it_ended():
    def rank(group):
        group.all_reduce(torch.ones(3), label="a")
        group.broadcast(torch.ones(2), src=1, label="b")
        return [s.label for s in group.submitted], [(i.kind, i.bytes, i.error) for i in group.finished]

    expected = (["a", "b"], [("all_reduce", 12, None), ("broadcast", 8, None)])
    assert run_ranks(rank, 2, wrap=Recording) == [expected] * 2


def test_recording_is_bounded_and_parts_have_their_own():
    (group,) = (Recording(g, limit=2) for g in ThreadGroup.world(1))
    for i in range(5):
        group.barrier(label=str(i))
    assert [s.label for s in group.submitted] == ["3", "4"]
    part = group.split(0)
    assert isinstance(part, Recording)
    assert part.submitted == []
    part.close()
    group.close()


def test_what_a_hook_of_the_inner_group_raises_comes_out_of_the_outer_wait_and_breaks_no_program():
    """The program has several steps; to stop after one of them would leave the other ranks alone with the rest."""

    def rank(group):
        t = torch.full((3,), float(group.rank + 1))
        group.inner.on_completion(lambda info: 1 / 0 if group.rank == 0 and info.label == "go" else None)
        errors = 0
        for _ in range(3):
            try:
                group.all_reduce(t, label="go")
            except HookError:
                errors += 1
            group.inner.flush_completions()
        try:
            group.close()
        except HookError:
            errors += 1
        return t.tolist(), errors

    assert run_ranks(rank, 2, wrap=Verified) == [([12.0] * 3, 3), ([12.0] * 3, 0)]


def test_a_deadline_names_the_missing():
    a, b, c = (Deadline(g, seconds=0.2) for g in ThreadGroup.world(3))
    b.barrier(async_op=True)
    with pytest.raises(CollectiveTimeout) as caught:
        a.barrier(label="meet")
    assert caught.value.missing == (2,)
    assert caught.value.joined == (0, 1)
    assert a.timeout == 0.2
    for group in (a, b, c):
        group.close(timeout=0)


def test_a_wrapper_inside_that_has_forgotten_its_step_still_reports_who_was_missing():
    """Which of two nested wrappers gives up first is a race; here the inner one has always gone when it is asked."""

    class Forgetful(NanCheck):
        def arrivals(self, work):
            return None if work.is_completed() else super().arrivals(work)

    a, b = (Verified(Forgetful(g)) for g in ThreadGroup.world(2, timeout=0.3))
    a.timeout = 10.0  # so that it is the inner one which gives up first
    with pytest.raises(CollectiveTimeout) as caught:
        a.all_reduce(torch.ones(1))
    assert (caught.value.joined, caught.value.missing) == ((0,), (1,))
    for group in (a, b):
        group.close(timeout=0)


def test_a_deadline_that_passes_between_two_steps_ends_the_operation():
    class Slow(Verified):
        def program(self, op):
            for step in super().program(op):
                yield step
                time.sleep(0.4)

    (group,) = map(Slow, ThreadGroup.world(1, timeout=0.2))
    with pytest.raises(CollectiveTimeout) as caught:
        group.all_reduce(torch.ones(1))
    assert caught.value.missing == ()
    group.close()


def test_a_deadline_is_more_than_nothing():
    (group,) = ThreadGroup.world(1)
    with pytest.raises(UsageError, match="timeout is 0. Pass a number of seconds above 0"):
        Deadline(group, seconds=0)
    group.close()


def test_a_latch_closes_with_the_first_failure_and_opens_on_recovery():
    def rank(group):
        with pytest.raises(CollectiveMismatch) as first:
            group.all_reduce(torch.ones(3 + group.rank))
        with pytest.raises(GroupAborted, match="an earlier operation failed with CollectiveMismatch") as second:
            group.barrier()
        assert second.value.__cause__ is group.first_failure
        assert type(group.first_failure) is type(first.value)
        group.recover()
        group.barrier()
        return group.first_failure

    assert run_ranks(rank, 2, wrap=Latched) == [None, None]


BAD = {
    "nan": (1, float("nan"), torch.float32),
    "infinity": (2, float("inf"), torch.bfloat16),
    "complex": (0, complex(0, float("nan")), torch.complex64),
}


@pytest.mark.parametrize("name", BAD)
def test_nan_check_names_the_rank_on_every_rank(name):
    bad, value, dtype = BAD[name]

    def rank(group):
        t = torch.ones(4, dtype=dtype)
        if group.rank == bad:
            t[2] = value
        with pytest.raises(NonFiniteGradient) as caught:
            group.all_reduce(t, label="layer.weight")
        group.all_reduce(torch.ones(2, dtype=torch.int64))
        return caught.value.rank, caught.value.parameter

    assert run_ranks(rank, 3, wrap=NanCheck) == [(bad, "layer.weight")] * 3


def test_nan_check_looks_at_what_is_contributed_only():
    def rank(group):
        t = torch.full((2,), 1.0 if group.rank == 1 else float("nan"))
        group.broadcast(t, src=1)
        return t.tolist()

    assert run_ranks(rank, 2, wrap=NanCheck) == [[1.0, 1.0]] * 2


@on_ranks(2, wrap=NanCheck)
def test_nan_check_sees_a_sum_that_overflows(group):
    with pytest.raises(NonFiniteGradient, match="every rank's values were finite"):
        group.all_reduce(torch.full((2,), 60_000.0, dtype=torch.float16))


def test_nan_check_refuses_to_send():
    def rank(group):
        if group.rank == 0:
            with pytest.raises(NonFiniteGradient):
                group.send(torch.tensor([float("nan")]), dst=1)
            group.send(torch.tensor([4.0]), dst=1)
            return 4.0
        t = torch.empty(1)
        group.recv(t, src=0)
        return t.item()

    assert run_ranks(rank, 2, wrap=NanCheck) == [4.0, 4.0]


def test_a_wrapper_may_ask_its_inner_group_in_properties_that_the_constructor_sets():
    class Slower(GroupWrapper):
        @property
        def timeout(self):
            return 2 * self.inner.timeout

        @timeout.setter
        def timeout(self, seconds):
            pass

    (group,) = ThreadGroup.world(1, timeout=5)
    with Slower(group) as slower:
        assert slower.timeout == 10


def test_a_wrapper_takes_whatever_time_out_its_inner_group_has():
    (group,) = ThreadGroup.world(1)
    group.timeout = float("inf")
    with Recording(group) as recording:
        assert recording.timeout == float("inf")


def test_a_group_may_set_its_own_end_before_and_after_construction():
    class Own(GroupWrapper):
        def __init__(self, inner):
            self.closed, self.failure = False, None
            super().__init__(inner)

        def close(self, timeout=5.0):
            super().close(timeout)
            self.closed = True

    (group,) = ThreadGroup.world(1)
    own = Own(group)
    assert not own.closed
    own.close()
    assert own.closed
    assert group.closed

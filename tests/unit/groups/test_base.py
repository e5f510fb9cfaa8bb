"""Group: what every group inherits. The group under test settles nothing by itself; the test does."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch

from gradwire.collectives import Collective, build
from gradwire.errors import ClosedError, CollectiveTimeout, GroupAborted, HookError, UsageError
from gradwire.groups import Group, Work


class ByHand(Group):
    """A group whose operations are settled by the test."""

    def submit(self, op: Collective) -> Work:
        return self.begin(op)


@pytest.fixture
def group() -> Iterator[ByHand]:
    group = ByHand(0, 2, name="hand", timeout=30.0)
    yield group
    group.ledger.hook_errors.clear()
    group.close(timeout=0.0)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_ranks_count_from_0(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} of size {size}"):
        ByHand(rank, size)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_group_needs_time(timeout: float) -> None:
    with pytest.raises(UsageError, match="timeout"):
        ByHand(0, 1, timeout=timeout)


def test_a_name_by_default(group: ByHand) -> None:
    other = ByHand(0, 1)
    assert other.name == "ByHand"
    assert repr(group) == "<hand rank 0 of 2, 0 in flight>"
    other.close()


def test_begin_numbers_checks_and_enters(group: ByHand) -> None:
    first, second = group.submit(build.barrier()), group.submit(build.barrier())
    assert (first.seq, second.seq) == (0, 1)
    assert list(group.ledger.pending.values()) == [first, second]
    assert repr(group) == "<hand rank 0 of 2, 2 in flight>"
    with pytest.raises(UsageError):
        group.submit(build.broadcast(torch.ones(1), src=2))
    assert group.submit(build.barrier()).seq == 2, "a refused operation has no number"


def test_the_nearer_deadline_counts(group: ByHand) -> None:
    assert group.submit(build.barrier()).timeout == 30.0
    assert group.submit(build.barrier().within(2.0)).timeout == 2.0
    assert group.submit(build.barrier().within(99.0)).timeout == 30.0


def test_begin_can_make_another_kind_of_work(group: ByHand) -> None:
    class Special(Work):
        pass

    assert isinstance(group.begin(build.barrier(), Special), Special)


def test_an_operation_begun_while_the_group_is_aborted_fails() -> None:
    """abort() may run after the check and before the operation is in the ledger: then neither sees the other by itself."""

    class Unlucky(ByHand):
        def check_usable(self, op: Collective) -> None:
            super().check_usable(op)
            self.abort("just now")

    group = Unlucky(0, 1)
    work = group.submit(build.barrier())
    assert isinstance(work.exception(), GroupAborted)
    group.close()


def test_a_hooks_error_does_not_refuse_a_submit_and_comes_out_of_the_wait(group: ByHand) -> None:
    def bad(info: object) -> None:
        raise KeyError("boom")

    with group.on_completion(bad):
        group.submit(build.barrier()).finish()
        assert group.flush_completions()
    work = group.submit(build.barrier())
    assert work.seq == 1
    with pytest.raises(
        CollectiveTimeout
    ):  # the operation goes first: a caller that catches the hook's error has its outputs
        work.wait(0.0)
    work.finish()
    with pytest.raises(HookError, match="boom") as caught:
        work.wait()
    assert isinstance(caught.value.__cause__, KeyError)
    assert work.wait()


class Splits(ByHand):
    """Pretends that the ranks passed the colors and keys given."""

    def __init__(self, rank: int, table: list[tuple[int, int]]) -> None:
        super().__init__(rank, len(table))
        self.table = table

    def submit(self, op: Collective) -> Work:
        work = self.begin(op)
        op.outputs[0].copy_(torch.tensor(self.table).flatten())
        work.finish()
        return work

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        return ByHand(ranks.index(self.rank), len(ranks), name=f"{name}:{ranks}")


def test_a_refused_split_does_not_put_the_names_of_later_ones_out_of_step() -> None:
    group = Splits(0, [(0, 0)])
    with pytest.raises(UsageError, match="color -3 is negative"):
        group.split(-3)
    group.failure = GroupAborted("boom")
    with pytest.raises(GroupAborted):
        group.split(0)
    group.failure = None
    names = []
    for _ in range(2):
        sub = group.split(0)
        assert sub is not None
        names.append(sub.name)
        sub.close()
    assert names == ["Splits/0.0:[0]", "Splits/1.0:[0]"]
    group.close()


def test_a_group_that_makes_no_subgroups_says_what_to_override(group: ByHand) -> None:
    with pytest.raises(UsageError, match=r"ByHand does not make subgroups.*subgroup"):
        group.subgroup([0], name="x")


def test_the_first_failure_stays() -> None:
    group = ByHand(0, 1)
    first = OSError("cable")
    group.fail(first)
    group.fail(OSError("another"))
    assert group.failure is first
    with pytest.raises(OSError, match="cable"):
        group.submit(build.barrier())
    group.close()


def test_close_waits_for_what_is_in_flight() -> None:
    group = ByHand(0, 1)
    work = group.submit(build.barrier())
    closing = threading.Thread(target=group.close, args=(20.0,))
    closing.start()
    work.finish()
    closing.join(100)
    assert not closing.is_alive()
    assert work.is_success()
    assert work.wait()


def test_close_gives_up_and_raises() -> None:
    group = ByHand(0, 1)
    work = group.submit(build.barrier())
    began = time.perf_counter()
    group.close(timeout=0.05)
    assert time.perf_counter() - began < 30
    with pytest.raises(ClosedError, match=r"closed with the operation in flight"):
        work.wait()
    with pytest.raises(ClosedError, match="Submit before close"):
        group.submit(build.barrier())
    group.close()


def test_close_does_not_wait_longer_than_an_operations_own_deadline() -> None:
    group = ByHand(0, 1)
    group.submit(build.barrier().within(0.05))
    began = time.perf_counter()
    group.close(timeout=60.0)
    assert time.perf_counter() - began < 30


def test_close_gives_back_what_the_group_holds_once() -> None:
    class Holds(ByHand):
        released = 0

        def _release(self) -> None:
            self.released += 1

    group = Holds(0, 1)
    group.close()
    group.close()
    assert group.released == 1


def test_the_context_manager_closes() -> None:
    with ByHand(0, 1) as group:
        group.submit(build.barrier()).finish()
    assert group.closed
    assert group.failure is None


def test_the_context_manager_aborts_on_an_error() -> None:
    group = ByHand(0, 1)
    with group:
        work = group.submit(build.barrier())
        try:
            with group:
                raise ValueError("bad batch")
        except ValueError:
            pass
        with pytest.raises(GroupAborted, match="ValueError: bad batch"):
            work.wait()
    assert group.closed


def test_a_dropped_group_ends_its_threads() -> None:
    group = ByHand(0, 1, name="dropped")
    group.on_completion(lambda info: None)
    group.submit(build.barrier()).finish()
    weak = weakref.ref(group)
    assert any("dropped" in t.name for t in threading.enumerate())
    del group
    gc.collect()
    assert weak() is None
    assert not any("dropped" in t.name for t in threading.enumerate())


def test_an_operation_of_a_dropped_group_can_still_time_out() -> None:
    work = ByHand(0, 1, name="dropped").submit(build.barrier().within(0.05))
    gc.collect()
    with pytest.raises(CollectiveTimeout, match="cannot determine which ranks are missing"):
        work.wait()

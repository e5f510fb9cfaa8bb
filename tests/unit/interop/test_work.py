"""TorchWork reports its true state, in flight, afterwards and in failure."""

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from gradwire import ThreadGroup
from gradwire.collectives import OpKind
from gradwire.errors import CollectiveTimeout, GroupAborted, UsageError
from gradwire.interop import GradwireProcessGroup, TorchWork, as_process_group
from gradwire.interop.work import _OP_TYPES

OVER_IN_SHORT = timedelta(milliseconds=20)


@pytest.fixture
def pair() -> Iterator[list[GradwireProcessGroup]]:
    """Two ranks, both driven by the test: an operation is in flight until the second joins."""
    groups = ThreadGroup.world(2, timeout=20.0)
    yield [as_process_group(group) for group in groups]
    for group in groups:
        group.close()


def test_in_flight_and_finished(pair: list[GradwireProcessGroup]) -> None:
    x, y = torch.ones(3), torch.ones(3)
    work = pair[0].allreduce([x])
    assert isinstance(work, dist.Work)
    assert (work.is_completed(), work.is_success(), work.exception()) == (False, False, None)
    with pytest.raises(UsageError, match="still running"):
        work._get_duration()
    pair[1].allreduce([y])
    assert work.wait()
    assert work.wait(timedelta(0))
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    assert work.result()[0] is x
    assert work._get_duration() >= 0
    assert work._get_op_type() == int(c10d.OpType.ALLREDUCE)
    work.synchronize()
    work.block_current_stream()
    assert "all_reduce" in repr(work)


def test_a_wait_that_times_out_leaves_the_operation_running(pair: list[GradwireProcessGroup]) -> None:
    work = pair[0].barrier()
    with pytest.raises(CollectiveTimeout) as caught:
        work.wait(OVER_IN_SHORT)
    assert caught.value.missing == (1,)
    assert not work.is_completed()
    pair[1].barrier()
    assert work.wait(timedelta(seconds=10))


def test_a_failed_work_raises_on_every_wait(pair: list[GradwireProcessGroup]) -> None:
    work = pair[0].allreduce([torch.ones(1)])
    pair[1].abort()
    for _ in range(2):
        with pytest.raises(GroupAborted):
            work.wait()
    assert (work.is_completed(), work.is_success()) == (True, False)
    assert isinstance(work.exception(), GroupAborted)
    with pytest.raises(GroupAborted):
        work.synchronize()
    with pytest.raises(GroupAborted):
        work.result()


def test_the_deadline_of_one_operation(pair: list[GradwireProcessGroup]) -> None:
    options = dist.AllreduceOptions()
    options.timeout = OVER_IN_SHORT
    with pytest.raises(CollectiveTimeout):
        pair[0].allreduce([torch.ones(1)], options).wait()


# -- futures -------------------------------------------------------------------------------------------------------------


def test_the_future_holds_the_outputs(pair: list[GradwireProcessGroup]) -> None:
    work = pair[0].allreduce([torch.ones(2)])
    future = work.get_future()
    assert future is work.get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    assert not future.done()
    pair[1].allreduce([torch.ones(2)])
    assert future.wait()[0].tolist() == [2, 2]
    assert doubled.wait().tolist() == [4, 4]
    late = pair[1].broadcast([torch.ones(1)])
    pair[0].broadcast([torch.ones(1)])
    assert late.get_future().wait()[0].tolist() == [1]


def test_the_future_of_a_failed_work_has_failed_for_c_plus_plus_too(pair: list[GradwireProcessGroup]) -> None:
    work = pair[0].allreduce([torch.ones(2)])
    future = work.get_future()
    pair[1].abort()
    with pytest.raises(RuntimeError, match=r"GroupAborted: .*aborted"):
        future.wait()
    again = future.then(lambda f: f.value())
    with pytest.raises(RuntimeError, match="GroupAborted"):
        again.wait()


def test_the_work_result_as_a_future(pair: list[GradwireProcessGroup]) -> None:
    well = pair[0].barrier()
    pair[1].barrier()
    late = pair[0].barrier(OVER_IN_SHORT)
    with pytest.raises(CollectiveTimeout):
        late.wait()
    aborted = pair[0].barrier()
    pair[0].abort()
    results = [c10d.WorkResult(work.get_future_result().wait()).name for work in (well, late, aborted)]
    assert results == ["SUCCESS", "TIMEOUT", "COMM_ERROR"]


# -- sources, several at once --------------------------------------------------------------------------------------------


def test_source_ranks(pair: list[GradwireProcessGroup]) -> None:
    work = pair[1].recv_anysource([torch.empty(2)], 5)
    with pytest.raises(UsageError, match="not known"):
        work._source_rank()
    pair[0].send([torch.ones(2)], 1, 5)
    assert work.wait()
    assert work.source_rank() == work._source_rank() == 0
    named = pair[1].recv([torch.empty(1)], 0, 0)
    pair[0].send([torch.ones(1)], 1, 0)
    assert named.source_rank() == 0


def test_several_works_as_one(pair: list[GradwireProcessGroup]) -> None:
    outputs = [[torch.empty(1), torch.empty(2)] for _ in range(2)]
    work = pair[0].allgather_coalesced(outputs, [torch.zeros(1), torch.zeros(2)])
    future = work.get_future()
    assert not work.is_completed()
    with pytest.raises(CollectiveTimeout):
        work.wait(OVER_IN_SHORT)
    theirs = [[torch.empty(1), torch.empty(2)] for _ in range(2)]
    pair[1].allgather_coalesced(theirs, [torch.ones(1), torch.ones(2)])
    assert work.wait(timedelta(seconds=10))
    assert work.is_success()
    assert len(work.result()) == len(future.wait()) == 4
    assert outputs[1][1].tolist() == [1, 1]
    assert work._get_op_type() == int(c10d.OpType.COALESCED)
    assert work._get_duration() >= 0
    with pytest.raises(UsageError, match="only one receive"):
        work.source_rank()


def test_no_work_at_all_is_done() -> None:
    work = TorchWork()
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().wait() == []


def test_every_kind_has_a_name_in_c10d() -> None:
    assert {_OP_TYPES[kind] for kind in OpKind} >= {c10d.OpType.ALLREDUCE, c10d.OpType.BARRIER, c10d.OpType.RECV}


# -- life time -----------------------------------------------------------------------------------------------------------


def test_a_work_that_only_c_plus_plus_holds_stays_whole() -> None:
    """See Note [Who keeps a Work alive]: C++ makes the call, keeps the Work, and waits on it much later."""
    (group,) = ThreadGroup.world(1)
    pg = as_process_group(group)
    pg._set_group_name("held by C++")
    c10d._register_process_group("held by C++", pg)
    try:
        t = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "held by C++")
        gc.collect()
        assert torch.ops._c10d_functional.wait_tensor(t).tolist() == [1, 1]
    finally:
        c10d._unregister_process_group("held by C++")
        group.close()


def test_a_finished_work_is_let_go(pair: list[GradwireProcessGroup]) -> None:
    work = pair[0].barrier()
    future = work.get_future()
    pair[1].barrier()
    assert work.wait()
    gone = weakref.ref(work)
    del work, future
    gc.collect()
    assert gone() is None

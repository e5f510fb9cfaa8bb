"""Names, abilities, parts, coalescing, hooks and the end of a gradwire group as torch sees it."""

import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import gradwire as gw
from gradwire import Group, ThreadGroup, Verified
from gradwire.errors import ClosedError, GroupAborted, HookError, UsageError, UsageRuntimeError, UsageTypeError
from gradwire.interop import GradwireProcessGroup, as_process_group
from gradwire.interop.process_group import PYTHON_BACKENDS
from gradwire.testing import run_ranks

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[GradwireProcessGroup]:
    (group,) = ThreadGroup.world(1, timeout=5.0)
    yield as_process_group(group, devices=["cpu"], store=dist.HashStore())
    group.close()


def on_threads(fn: Callable[[GradwireProcessGroup], Any], n: int = 3) -> list[Any]:
    return run_ranks(lambda group: fn(as_process_group(group)), n)


def test_names(alone: GradwireProcessGroup) -> None:
    assert alone.name() == alone._get_backend_name() == "gradwire"
    assert (alone.group_name, alone.group_desc) == ("threads", "undefined")
    alone._set_group_name("7")
    alone._set_group_desc("mesh_tp")
    assert (alone.group_name, alone.group_desc) == ("7", "mesh_tp")
    assert (alone.rank(), alone.size()) == (0, 1)
    assert repr(alone) == "<gradwire process group '7' over <threads rank 0 of 1, 0 in flight>>"
    assert as_process_group(alone.group, backend_name="mine").name() == "mine"


def test_it_is_its_own_back_end(alone: GradwireProcessGroup) -> None:
    assert alone._device_types == [CPU]
    assert alone._get_backend(CPU) is alone
    with pytest.raises(UsageRuntimeError, match=r"serves cpu, not meta"):
        alone._get_backend(torch.device("meta"))
    with pytest.raises(RuntimeError):  # what torch's callers catch
        alone._get_backend(torch.device("cuda"))
    abilities = ("splitting", "coalescing", "time_estimate", "shrinking")
    assert [getattr(alone, f"supports_{ability}") for ability in abilities] == [PYTHON_BACKENDS, *[False] * 3]


def test_memory_comes_from_the_group(alone: GradwireProcessGroup) -> None:
    memory = torch.zeros(4)
    alone.group.allocate = lambda numel, *, dtype, device: memory  # type: ignore[method-assign]
    assert alone.supports_tensor_alloc(CPU)
    assert not alone.supports_tensor_alloc(torch.device("cuda"))
    assert alone.allocate_tensor(4, dtype=torch.float32, device=CPU) is memory


def test_the_store_goes_with_the_group(alone: GradwireProcessGroup) -> None:
    assert isinstance(alone.get_group_store(), dist.HashStore)
    alone.shutdown()
    assert alone.get_group_store() is None


def test_devices_are_those_of_the_machine() -> None:
    (group,) = ThreadGroup.world(1)
    with group:
        kinds = [device.type for device in as_process_group(group)._device_types]
    assert kinds == (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])


def test_shutdown_closes_and_abort_aborts(alone: GradwireProcessGroup) -> None:
    alone.shutdown()
    alone.shutdown()
    assert alone.group.closed
    with pytest.raises(ClosedError):
        alone.barrier()
    (group,) = ThreadGroup.world(1)
    other = as_process_group(group)
    other.abort()
    with pytest.raises(GroupAborted, match="torch aborted"):
        other.barrier()
    other.shutdown()


def test_set_timeout_reaches_the_group_inside_wrappers() -> None:
    (group,) = ThreadGroup.world(1)
    wrapped = Verified(gw.Recording(group))
    pg = as_process_group(wrapped)
    pg.set_timeout(timedelta(seconds=7))
    assert wrapped.timeout == group.timeout == 7.0
    with pytest.raises(UsageError, match="timeout is 0.0. Pass a number of seconds above 0"):
        pg.set_timeout(timedelta(0))
    pg.shutdown()


def test_the_python_half_must_be_kept(alone: GradwireProcessGroup) -> None:
    """C++ alone does not keep it; what is left is an error, not a crash. Since torch 2.15 the backend is left."""
    boxed = as_process_group(alone.group).boxed()
    gc.collect()
    rest = dist.ProcessGroup.unbox(boxed)
    if PYTHON_BACKENDS:
        assert rest.allreduce([torch.ones(1)]).wait()
        dist._broadcast_coalesced(rest, [torch.ones(1)], 1024, 0)
        return
    with pytest.raises(RuntimeError, match="No backend type associated"):
        rest.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="No backend type associated"):
        dist._broadcast_coalesced(rest, [torch.ones(1)], 1024, 0)


def test_split_group() -> None:
    def scenario(pg: GradwireProcessGroup) -> Any:
        part = pg.split_group([2, 0], timeout=timedelta(seconds=3), group_name="pair", group_desc="two of three")
        if part is None:
            return None
        t = torch.tensor([float(pg.rank())])
        part.broadcast(t, 0).wait()
        facts = [part.rank(), part.size(), t.item(), part.group_name, part.group_desc, part.group.timeout, part.name()]
        part.shutdown()
        return facts

    first, second, third = on_threads(scenario)
    assert second is None
    assert first == [1, 2, 2.0, "pair", "two of three", 3.0, "gradwire"]
    assert third == [0, 2, 2.0, "pair", "two of three", 3.0, "gradwire"]


def test_split_group_names_parts_and_keeps_wrappers_and_store() -> None:
    def scenario(group: Group) -> Any:
        pg = as_process_group(gw.Recording(group), store=dist.HashStore())
        parts = [pg.split_group([0, 1]), pg.split_group([0, 1], device_types=[CPU])]
        names = [part.group_name for part in parts]
        kinds = [type(part.group).__name__ for part in parts]
        assert all(part.get_group_store() is not None for part in parts)
        for part in parts:
            part.barrier().wait()
            part.shutdown()
        return names, kinds

    for names, kinds in run_ranks(scenario, 2):
        assert names == ["Recording(threads)/0.1.1", "Recording(threads)/0.1.2"]
        assert kinds == ["Recording", "Recording"]


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [-1]])
def test_split_group_refuses(alone: GradwireProcessGroup, ranks: list[int]) -> None:
    with pytest.raises(UsageError, match="pass distinct ranks from 0 to 0"):
        alone.split_group(ranks)


def test_members_are_fixed(alone: GradwireProcessGroup) -> None:
    with pytest.raises(UsageError, match="members are fixed"):
        alone.merge_remote_group(dist.HashStore(), 2, timedelta(seconds=1))


def test_a_coalesced_block_has_one_work() -> None:
    def scenario(pg: GradwireProcessGroup) -> Any:
        pg._start_coalescing(CPU)
        a, b = torch.ones(1), torch.full((1,), float(pg.rank()))
        pg.allreduce([a])
        pg.broadcast([b])
        work = pg._end_coalescing(CPU)
        work.wait()
        pg._start_coalescing(CPU)
        return [a.item(), b.item(), len(work.works), pg._end_coalescing(CPU)]

    assert on_threads(scenario) == [[3.0, 0.0, 2, None]] * 3


def test_the_end_of_no_block(alone: GradwireProcessGroup) -> None:
    with pytest.raises(UsageError, match="no block was started"):
        alone._end_coalescing(CPU)


def test_completion_hooks_get_c10ds_record(alone: GradwireProcessGroup) -> None:
    seen: list[Any] = []
    assert not alone._has_hooks()
    handle = alone._register_on_completion_hook(seen.append)
    assert alone._has_hooks()
    alone._enable_collectives_timing()
    alone.allreduce([torch.ones(1)]).wait()
    alone.barrier().wait()
    alone._wait_for_pending_works()
    handle.remove()
    alone.barrier().wait()
    assert [(info.op_type, info.seq) for info in seen] == [(c10d.OpType.ALLREDUCE, 0), (c10d.OpType.BARRIER, 1)]
    for info in seen:
        assert info.time_finished - info.time_started == pytest.approx(
            info.active_duration, abs=timedelta(microseconds=2)
        )
        assert info.active_duration >= timedelta(0)


def test_a_hook_that_raises_is_named(alone: GradwireProcessGroup) -> None:
    def broken(info: Any) -> None:
        raise LookupError("no such thing")

    with alone._register_on_completion_hook(broken):
        alone.barrier().wait()
        alone._wait_for_pending_works()
    with pytest.raises(HookError, match=r"broken.*LookupError: no such thing") as caught:
        alone.barrier().wait()
    assert caught.value.hook.endswith("broken")


def test_a_hook_must_be_callable(alone: GradwireProcessGroup) -> None:
    with pytest.raises(UsageTypeError, match="5 is not callable"):
        alone._register_on_completion_hook(5)  # type: ignore[arg-type]


def test_waiting_for_what_is_in_flight() -> None:
    first, second = ThreadGroup.world(2, timeout=0.3)
    pg = as_process_group(first)
    work = pg.barrier()
    pg._wait_for_pending_works()  # no other rank joins: the deadline ends it, and the wait does not raise
    assert work.is_completed()
    assert not work.is_success()
    first.close()
    second.close()


def test_sequence_numbers(alone: GradwireProcessGroup) -> None:
    alone._set_sequence_number_for_group()
    assert alone._get_sequence_number_for_group() == 0
    alone.barrier().wait()
    alone.group.barrier()  # operations of the group's own users count too
    alone.barrier().wait()
    assert alone._get_sequence_number_for_group() == 3

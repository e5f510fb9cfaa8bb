"""Groups whose ranks are processes: who is dead, who disagrees, and what the profiler shows."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import gradwire as gw
from gradwire.collectives import OpKind, ReduceOp, build
from gradwire.errors import CollectiveMismatch
from gradwire.groups import Verified
from gradwire.runtime.host import is_dead, process_start
from gradwire.testing import run_ranks


def test_a_process_that_cannot_be_looked_at_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start(child.pid)
    assert start
    assert not is_dead(child.pid, start)
    assert is_dead(child.pid, start + "1")
    with monkeypatch.context() as patched:

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(24, "Too many open files")

        patched.setattr("builtins.open", full)
        assert not is_dead(child.pid, start)
    child.communicate()
    assert is_dead(child.pid, start)


DIFFERENT = {
    "shape": lambda rank: build.all_reduce(torch.ones(3 + (rank == 1))),
    "dtype": lambda rank: build.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32)),
    "op": lambda rank: build.all_reduce(torch.ones(3), op=ReduceOp.MAX if rank == 1 else ReduceOp.SUM),
    "kind": lambda rank: build.barrier() if rank == 1 else build.all_reduce(torch.ones(3)),
    "root": lambda rank: build.broadcast(torch.ones(3), src=int(rank == 1)),
    "label": lambda rank: build.all_reduce(torch.ones(3), label=f"layer {rank == 1}"),
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_verified_says_who_disagrees_in_what(what, kind):
    def rank(group):
        with pytest.raises(CollectiveMismatch) as caught:
            group.submit(DIFFERENT[what](group.rank)).wait()
        group.barrier(label="still in step")
        return str(caught.value), {r: s.kind for r, s in caught.value.ops.items()}

    for text, ops in run_ranks(rank, 3, kind=kind, wrap=Verified):
        assert f"ranks differ in {what}: rank 1 has" in text
        assert ops[0] is (OpKind.BROADCAST if what == "root" else OpKind.ALL_REDUCE)
        assert sorted(ops) == [0, 1, 2]


def shown(use):
    """The names of our operations that a profile of `use` has, and whether each took time."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        use()
    return {event.name: event.cpu_time_total > 0 for event in profiler.events() if event.name.startswith("gradwire:")}


@pytest.mark.parametrize("kind", ["threads", "shared_memory", "gloo", "hierarchical"])
def test_collectives_of_a_group_are_shown(kind):
    def rank_main(group):
        def use():
            group.all_reduce(torch.ones(5))
            group.all_gather_into_tensor(torch.empty(2 * group.size), torch.ones(2), async_op=True).wait()
            group.barrier()

        group.barrier()
        if kind != "threads" or group.rank == 0:  # the profiler is of the whole process
            return shown(use)
        use()
        return None

    for found in run_ranks(rank_main, 2, kind=kind):
        if found is not None:
            assert found.keys() >= {"gradwire:all_reduce", "gradwire:all_gather_into_tensor", "gradwire:barrier"}
            assert all(found.values())


def test_collectives_of_the_back_end_are_shown(tmp_path):
    gw.interop.register_backend()
    dist.init_process_group("gradwire", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert "gradwire:all_reduce" in shown(lambda: dist.all_reduce(torch.ones(3)))
    finally:
        dist.destroy_process_group()


def test_without_a_profiler_there_is_no_range():
    [group] = gw.ThreadGroup.world(1)
    work = group.all_reduce(torch.ones(1), async_op=True)
    assert work.profiled is None
    work.wait()
    group.close()

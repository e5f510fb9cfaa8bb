"""torch's profiler shows the collectives of every group."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import gradwire as gw
from gradwire.testing import run_ranks


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

"""A Work that C++ asks for its wait, its future or its value, in every order and on its own threads: each ends by the deadline."""

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.testing import run_ranks
from helpers.torch_world import torch_world

KINDS = ["gloo", "shared_memory", "hierarchical"]


def join(rank: int) -> float:
    """The reducer waits for the count of active ranks, then takes the value of its future. Python has dropped the Work."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    net = DistributedDataParallel(model)
    with net.join(divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            net(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    return float(model.weight.grad[0, 0]) - 2 * (2 + rank)


def many_dropped(rank: int) -> float:
    """Other Works are waited for, and large ones dropped, between the forward and the backward."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    net = DistributedDataParallel(model)
    with net.join(divide_by_initial_world_size=False):
        loss = net(torch.ones(2, 4)).sum()
        for _ in range(100):
            dist.all_reduce(torch.ones(1))
        large = [dist.all_reduce(torch.ones(10_000), async_op=True) for _ in range(3)]
        del large
        gc.collect()
        loss.backward()
    assert model.weight.grad is not None
    return float(model.weight.grad[0, 0])


def functional_collective(rank: int) -> float:
    """wait_tensor: C++ holds the Work, and waits."""
    return float(functional.all_reduce(torch.ones(3) * (rank + 1), "sum", dist.group.WORLD).sum())


def all_reduce() -> tuple[torch.Tensor, Any]:
    t = torch.ones(2)
    return t, dist.all_reduce(t, async_op=True)


def future_then_wait(rank: int) -> float:
    _, work = all_reduce()
    future = work.get_future()
    work.wait()
    return float(work.get_future().value()[0].sum()) + float(future.wait()[0].sum())


def wait_then_value(rank: int) -> float:
    _, work = all_reduce()
    work.wait()
    return float(work.get_future().value()[0].sum())


def future_of_a_dropped_work(rank: int) -> float:
    t, work = all_reduce()
    future = work.get_future().then(lambda done: done.value()[0] * 2)
    del work
    gc.collect()
    return float(future.wait().sum()) + float(t.sum())


def on_another_thread(rank: int) -> float:
    """A thread waits in C++ while this one holds the interpreter lock most of the time."""
    _, work = all_reduce()
    future, results = work.get_future(), []
    thread = threading.Thread(target=lambda: results.append(float(future.wait()[0].sum())))
    thread.start()
    while thread.is_alive():
        sum(range(1000))
    work.wait()
    return results[0]


ORDERS = {
    join: 0.0,
    many_dropped: 2.0,
    functional_collective: 9.0,
    future_then_wait: 8.0,
    wait_then_value: 4.0,
    future_of_a_dropped_work: 12.0,
    on_another_thread: 4.0,
}
"""Each order, and what it returns on every rank."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_order_ends(kind: str) -> None:
    def rank_main(group: gw.Group) -> list[Any]:
        with torch_world(group, "gradwire", kind=kind):
            return [order(group.rank) for order in ORDERS]

    for results in run_ranks(rank_main, 2, kind="gloo"):
        assert results == [*ORDERS.values()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ask", ["wait", "future", "value", "reducer"])
def test_with_a_missing_rank_every_order_ends_by_the_deadline(kind: str, ask: str) -> None:
    def reducer() -> None:
        net = DistributedDataParallel(nn.Linear(4, 4), init_sync=False)
        with net.join(divide_by_initial_world_size=False):
            net(torch.ones(2, 4)).sum().backward()

    asked: dict[str, Callable[[], object]] = {
        "wait": lambda: all_reduce()[1].wait(),
        "future": lambda: all_reduce()[1].get_future().wait(),
        "value": lambda: functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD).sum(),
        "reducer": reducer,
    }

    def rank_main(group: gw.Group) -> None:
        with torch_world(group, "gradwire", kind=kind):
            dist.group.WORLD.set_timeout(timedelta(seconds=0.8))
            if group.rank == 0:
                with pytest.raises(
                    (RuntimeError, gw.GradwireError), match="not finished after|missing|timed out|is lost"
                ):
                    asked[ask]()
            group.barrier()

    run_ranks(rank_main, 2, kind="gloo")

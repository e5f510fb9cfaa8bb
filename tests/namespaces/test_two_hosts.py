"""HierarchicalGroup between real network namespaces: shared memory in each, gloo over the link between them."""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.distributed import TCPStore

import gradwire as gw
from gradwire.collectives import build
from gradwire.groups import Group, HierarchicalGroup, SharedMemoryGroup
from gradwire.lab import Host, hosts, why_not
from gradwire.testing import run_ranks
from helpers.warm_python import WarmProcess, WarmPython, on_host

WHY_NOT = why_not()
pytestmark = [pytest.mark.namespaces, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

SIZE, PORT, PATIENCE = 4, 29_777, 150.0
CHILD = "import sys, cloudpickle\nwith open(sys.argv[1], 'rb') as file:\n    cloudpickle.load(file)()"


def on_rank(fn: Callable[[Group], Any], rank: int, address: str, answer: Path) -> Callable[[], None]:
    """What a child process does."""

    def child() -> None:
        torch.set_num_threads(1)
        limit = timedelta(seconds=PATIENCE)
        store = TCPStore(address, PORT, SIZE, is_master=rank == 0, wait_for_workers=False, timeout=limit)
        with HierarchicalGroup.discover(store, rank, SIZE, timeout=30.0) as group:
            torch.save(fn(group), answer)
            store.set(f"done {rank}", "")
            if rank == 0:  # the store lives here; the last rank is the one that dies
                store.wait([f"done {r}" for r in range(SIZE - 1)], timedelta(seconds=20))

    return child


def run_on(machines: list[Host], fn: Callable[[Group], Any], folder: Path, python: WarmPython) -> None:
    """Run `fn(group)` on two ranks of each of two hosts. Each writes its answer into `folder`."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    children: list[WarmProcess] = []
    try:
        for rank in range(SIZE):
            host = machines[rank // 2]
            script = folder / f"{rank}.pickle"
            script.write_bytes(cloudpickle.dumps(on_rank(fn, rank, machines[0].address, folder / f"{rank}.pt")))
            env = {"GLOO_SOCKET_IFNAME": host.interface}
            children.append(python.start(on_host(host, CHILD), str(script), env=env))
        deadline = time.monotonic() + PATIENCE
        for child in children:
            child.wait(max(0.1, deadline - time.monotonic()))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        for child in children:
            child.kill()


def train(group: Group) -> dict[str, Any]:
    """An all-reduce, a broadcast, and some steps of a model."""
    total = torch.arange(5000, dtype=torch.float64) + group.rank
    group.all_reduce(total)
    received = torch.full((3000,), float(group.rank))
    group.broadcast(received, src=SIZE - 1)
    generator = torch.Generator().manual_seed(group.rank)
    model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) * (number + group.rank + 1))
    ddp = gw.DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        ddp(torch.randn(8, 20, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    trained = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"total": total, "received": received, "trained": trained}


def survive(group: Group) -> tuple[str, int | None, float]:
    """The last rank dies; the others return the error they get."""
    group.barrier()
    if group.rank == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.perf_counter()
    try:
        group.submit(build.all_reduce(torch.ones(9), label="doomed").within(60)).wait()
    except gw.GroupError as error:
        return type(error).__name__, getattr(error, "rank", None), time.perf_counter() - began
    return "finished", None, 0.0


def train_and_survive(group: HierarchicalGroup, note: Path) -> dict[str, Any]:
    facts = train(group)
    mine = isinstance(group.inside, SharedMemoryGroup) and group.inside.in_heap(group.allocate(100))
    facts |= {"hosts": group.layout.hosts, "in_heap": mine}
    torch.save(facts, note / f"{group.rank}.trained")
    return {"received": survive(group)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Path:
    """What the ranks of two hosts have written. One world for all tests, since to start its processes takes longest."""
    folder = tmp_path_factory.mktemp("hosts")
    with hosts(2) as machines:
        run_on(machines, lambda group: train_and_survive(group, folder), folder, warm_python)
    return folder


def test_two_hosts_train_as_one_does(folder: Path) -> None:
    there = [torch.load(folder / f"{rank}.trained") for rank in range(SIZE)]
    flat = run_ranks(train, SIZE, kind="gloo")
    for rank, facts in enumerate(there):
        assert facts["hosts"] == ((0, 1), (2, 3))
        assert facts["in_heap"]
        torch.testing.assert_close(facts["total"], flat[rank]["total"])
        assert torch.equal(facts["received"], flat[rank]["received"])
        torch.testing.assert_close(facts["trained"], flat[rank]["trained"])
        assert torch.equal(facts["trained"], there[0]["trained"])


def test_a_rank_that_dies_on_one_host_is_named_on_the_other(folder: Path) -> None:
    assert not (folder / f"{SIZE - 1}.pt").exists()
    for rank in range(SIZE - 1):
        kind, lost, seconds = torch.load(folder / f"{rank}.pt")["received"]
        assert (kind, lost) == ("PeerLost", SIZE - 1)
        assert seconds < 30

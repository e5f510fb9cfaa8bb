"""torch's own DDP and `dist` functions under mpirun, over `register_backend(kind="mpi")`: the same as over gloo."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.groups.mpi import MPIGroup
from gradwire.testing import run_ranks
from gradwire.testing.mpi import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

STEPS = 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))


def train(model: nn.Module, rank: int) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(16, 8, generator=data)
        nn.functional.mse_loss(model(inputs), inputs[:, :4].sin()).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def ddp(rank: int, size: int) -> torch.Tensor:
    return train(DistributedDataParallel(make_model(), bucket_cap_mb=0.001), rank)


def ddp_half(rank: int, size: int) -> torch.Tensor:
    """bfloat16, which MPI does not support, in the buckets."""
    model = DistributedDataParallel(nn.Linear(8, 4).bfloat16())
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    model(torch.full((2, 8), 1.0 + rank, dtype=torch.bfloat16)).sum().backward()
    return torch.cat([p.grad.flatten().float() for p in model.parameters()])


def sub_groups(rank: int, size: int) -> list[Any]:
    """Halves of the world, and all of it once more; and objects, which torch pickles."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group(list(range(size)))]
    sums = []
    for members, group in zip(([0, 1], [2, 3], range(size)), groups, strict=True):
        if rank in members:
            t = torch.tensor([float(rank)])
            dist.all_reduce(t, group=group)
            sums.append(t.item())
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    return [sums, gathered]


def on_both(torch_world: Callable[..., Any], scenario: Callable[[int, int], Any], n: int) -> list[tuple[Any, Any]]:
    def rank_main(group: gw.Group) -> tuple[Any, Any]:
        with torch_world(group, "gloo"):
            over_gloo = scenario(group.rank, group.size)
        gw.register_backend("stock_mpi", kind="mpi")
        with torch_world(group, "stock_mpi"):
            assert isinstance(gw.from_process_group(), MPIGroup)
            return over_gloo, scenario(group.rank, group.size)

    return run_ranks(rank_main, n, kind="mpi")


@pytest.mark.parametrize("scenario", [ddp, ddp_half], ids=lambda s: s.__name__)
def test_same_as_over_gloo(scenario: Callable[..., Any], world_of_torch: Callable[..., Any]) -> None:
    results = on_both(world_of_torch, scenario, 2)
    for over_gloo, over_mpi in results:
        torch.testing.assert_close(over_mpi, over_gloo, rtol=1e-5, atol=1e-6)
    assert torch.equal(results[0][1], results[1][1])


def test_groups_of_some_ranks(world_of_torch: Callable[..., Any]) -> None:
    for over_gloo, over_mpi in on_both(world_of_torch, sub_groups, 4):
        assert over_mpi == over_gloo

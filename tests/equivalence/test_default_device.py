"""torch.set_default_device determines where users' tensors are made, not where gradwire makes its own."""

import pytest
import torch
from torch import nn

from gradwire import hooks
from gradwire.groups import Group, HierarchicalGroup, NanCheck, Verified
from gradwire.parallel import DistributedDataParallel
from gradwire.testing import run_ranks


def _operations(group: Group) -> list[float]:
    t, large = torch.ones(3), torch.ones(200_000)
    places = torch.empty(group.size * large.numel())
    with torch.device("meta"):  # whatever is made without a device has no data
        group.barrier()
        group.all_reduce(t)
        group.all_gather_into_tensor(places, large)
        part = group.split(0)
        assert part is not None
        part.all_reduce(t)
        NanCheck(Verified(part)).all_reduce(t)
        part.close()
    return [t.sum().item(), places.sum().item()]


@pytest.mark.parametrize("kind", ["threads", "shared_memory", "gloo", "hierarchical"])
def test_operations_of_groups(kind: str) -> None:
    assert run_ranks(_operations, 2, kind=kind) == [[24.0, 400_000.0]] * 2


def test_hosts_meet() -> None:
    def rank_main(world: Group) -> float:
        inside, across = world.split(world.rank // 2), world.split(world.rank % 2)
        t = torch.ones(3)
        assert inside is not None
        with torch.device("meta"), HierarchicalGroup(inside, across, rank=world.rank) as group:
            group.all_reduce(t)
        return t.sum().item()

    assert run_ranks(rank_main, 4, kind="threads") == [12.0] * 4


HOOKS = [
    hooks.mean(),
    hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8)),
    hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.5)),
    hooks.chain(hooks.random_k(ratio=0.5), hooks.mean()),
    hooks.chain(hooks.error_feedback(), hooks.power_sgd(rank=1)),
    hooks.decoupled_momentum(),
    hooks.chain(hooks.error_feedback(), hooks.chunked_top_k(4, chunk=16, bits=2)),
    hooks.dion(rank=2),
]


def _trained(hook: hooks.CommHook, device: str) -> list[float]:
    def rank_main(group: Group) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(group.rank))
        with torch.device(device):
            ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
            ddp.set_hook(hook)
            for _ in range(2):
                ddp(x).sum().backward()
            ddp.replica.detach()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist()

    first: list[float] = run_ranks(rank_main, 2, kind="gloo")[0]
    return first


@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_training(hook: hooks.CommHook) -> None:
    assert _trained(hook, "meta") == _trained(hook, "cpu")

"""Modules that cannot be replicated are refused by the names of their parameters."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import GroupAborted, UsageError, UsageTypeError
from gradwire.groups import Group, ThreadGroup
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from helpers.rank_tests import on_ranks


def replicate_over(model: Any, group: Group) -> Any:
    return replicate(model, group=group)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A device mesh of two ranks of which one exists: enough to make DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def sharded(kind: str, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if kind == "fully_shard":
        return fully_shard(model, mesh=mesh)
    return parallelize_module(model, mesh, {"0": ColwiseParallel()})


@pytest.mark.parametrize("form", ["ddp", "replicate"])
@pytest.mark.parametrize("kind", ["fully_shard", "parallelize_module"])
def test_dtensors_are_refused_by_name(mesh: Any, kind: str, form: str) -> None:
    (group,) = ThreadGroup.world(1)
    with group, pytest.raises(UsageError, match=r"0\.weight.* are DTensors.*2-D device mesh"):
        model = sharded(kind, mesh)
        DDP(model, process_group=group) if form == "ddp" else replicate(model, group=group)


def test_dtensors_that_are_ignored_are_no_obstacle(mesh: Any) -> None:
    (group,) = ThreadGroup.world(1)
    with group:
        model = sharded("parallelize_module", mesh)
        DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
        assert DDP(model, process_group=group).replica.names == ["1.weight", "1.bias"]


@pytest.mark.parametrize("wrap", [lambda m, g: DDP(m, process_group=g), replicate_over], ids=["ddp", "replicate"])
@pytest.mark.parametrize("part", ["all", "a parameter", "a buffer"])
def test_the_meta_device_is_refused_by_name(wrap: Any, part: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    if part == "a buffer":
        model[1].running_mean = torch.zeros(4, device="meta")
    else:
        (model if part == "all" else model[0]).to("meta")
    first = {
        "all": r"0\.weight, 0\.bias, 1\.weight, 1\.bias and 3 more",
        "a parameter": r"0\.weight",
        "a buffer": r"1\.running_mean",
    }
    (group,) = ThreadGroup.world(1)
    with group, pytest.raises(UsageError, match=rf"Sequential: {first[part]}.* on the meta device.*to_empty\(device="):
        wrap(model, group)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(6, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(nn.functional.embedding(x, self.table, sparse=self.sparse))

    sparse = True


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.parametrize("since", [0, 1, 5], ids=lambda n: f"from step {n}")
@on_ranks(2)
def test_a_sparse_gradient_in_a_dense_bucket_is_an_error_with_its_name(group: Group, since: int, views: bool) -> None:
    model = Lookup()
    ddp = DDP(model, process_group=group, gradient_as_bucket_view=views)
    words = torch.tensor([group.rank, 2])
    for step in range(since + 1):
        ddp.zero_grad()
        model.sparse = step == since
        if not model.sparse:
            ddp(words).sum().backward()
            continue
        with pytest.raises((UsageError, GroupAborted), match=r"gradient of table has layout.*sparse=False"):
            ddp(words).sum().backward()
    ddp.zero_grad()
    model.sparse = False
    ddp(words).sum().backward()  # it keeps working
    assert model.table.grad is not None
    assert model.table.grad.abs().sum() > 0


@on_ranks(2)
def test_a_model_on_an_aborted_group_is_refused_with_what_to_do(group: Group) -> None:
    group.barrier()
    group.abort("a step failed")
    with pytest.raises(GroupAborted, match="a step failed") as caught:
        DDP(nn.Linear(2, 2), process_group=group)
    assert "Call group.recover() on every rank first" in caught.value.__notes__[-1]
    group.recover()
    DDP(nn.Linear(2, 2), process_group=group)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (abs, "<built-in function abs>"),
        (None, "None"),
        (nn.Linear, "the class Linear"),
        ([nn.Linear(1, 1)], r"\[Linear"),
    ],
)
@pytest.mark.parametrize("build", [lambda model, group: DDP(model, process_group=group), replicate_over])
def test_what_is_not_a_module_is_named(group: Group, build: Any, model: Any, named: str) -> None:
    with pytest.raises(UsageTypeError, match=f"the model must be a torch.nn.Module, got {named}"):
        build(model, group)

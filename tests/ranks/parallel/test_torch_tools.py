"""Our class where torch's own tools check for torch's DDP: checkpoints, pipelines, Join, ZeRO, torch.compile."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.groups import Group, ThreadGroup
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.rank_tests import on_ranks


def mlp() -> nn.Sequential:
    generator, model = torch.Generator().manual_seed(0), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    return model


def inputs(rank: int, step: int = 0, rows: int = 4) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(model: nn.Module, optimizer: Any, rank: int, steps: int = 3) -> nn.Module:
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(rank, step)).pow(2).mean().backward()
        optimizer.step()
    return model


def same(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q)


def test_it_is_an_instance_of_torchs_class() -> None:
    (group,) = ThreadGroup.world(1)
    with group:
        ddp = DDP(mlp(), process_group=group)
        assert isinstance(ddp, TorchDDP)
        assert isinstance(ddp, nn.Module)
        assert not isinstance(ddp.module, TorchDDP)
        assert TorchDDP not in type(ddp).__mro__  # nothing of torch's class is inherited


@pytest.mark.parametrize("way", ["torch to ours", "ours to torch", "plain to ours"])
def test_torchs_checkpoint_functions_leave_the_prefix_out(torch_world: Callable[..., Any], way: str) -> None:
    makers: dict[str, Any] = {"torch": TorchDDP, "ours": DDP, "plain": lambda m: m}
    source, target = (makers[name] for name in way.split(" to "))

    def rank_main(group: Group) -> None:
        with torch_world(group, "gloo"):
            a, b = source(mlp()), target(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
            first, second = torch.optim.AdamW(a.parameters()), torch.optim.AdamW(b.parameters())
            trained(a, first, 0)
            state, moments = get_model_state_dict(a), get_optimizer_state_dict(a, first)
            assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias"]
            assert set(moments["state"]) == set(state)
            set_model_state_dict(b, copy.deepcopy(state))
            set_optimizer_state_dict(b, second, copy.deepcopy(moments))
            assert get_model_state_dict(b).keys() == state.keys()
            same(trained(a, first, 0), trained(b, second, 0))

    run_ranks(rank_main, 2, kind="gloo")


@pytest.mark.parametrize(
    "flags",
    [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=["plain", "static", "views", "unused"],
)
@on_ranks(2, kind="gloo")
def test_a_pipeline_averages_once_for_all_micro_batches(
    group: Group, torch_world: Callable[..., Any], flags: Any
) -> None:
    """torch's own class fails here after the first step, with an internal assertion, unless it looks for unused parameters."""
    with torch_world(group, "gloo"):
        alone = [dist.new_group([rank]) for rank in range(group.size)][group.rank]
        ddp = DDP(mlp(), **flags)
        stage = PipelineStage(ddp, 0, 1, torch.device("cpu"), group=alone)
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=lambda y, t: (y - t).pow(2).mean())
        for step in range(4):
            ddp.zero_grad()
            before = ddp.replica.reducer.steps
            schedule.step(inputs(group.rank, step), target=torch.zeros(4, 2))
            whole = mlp()
            for rank in range(group.size):
                whole(inputs(rank, step)).pow(2).mean().div(group.size).backward()
            for p, q in zip(ddp.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
            # In the first step some versions of torch run the stage once more, to infer the shapes of gradients.
            assert ddp.replica.reducer.steps - before in ((1, 2) if step == 0 else (1,))


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@on_ranks(2, kind="gloo")
def test_zero_redundancy_optimizer(group: Group, torch_world: Callable[..., Any], views: bool) -> None:
    with torch_world(group, "gloo"):
        a, b = DDP(mlp(), gradient_as_bucket_view=views), DDP(mlp(), gradient_as_bucket_view=views)
        whole = torch.optim.Adam(a.parameters(), lr=0.1)
        shards = ZeroRedundancyOptimizer(b.parameters(), optimizer_class=torch.optim.Adam, lr=0.1)
        same(trained(a, whole, group.rank), trained(b, shards, group.rank))


@pytest.mark.parametrize("with_zero", [False, True], ids=["model", "model and optimizer"])
@on_ranks(2, kind="gloo")
def test_torchs_join(group: Group, torch_world: Callable[..., Any], with_zero: bool) -> None:
    with torch_world(group, "gloo"):
        results = []
        for cls in (TorchDDP, DDP):
            ddp: Any = cls(mlp())
            optimizer = (
                ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
                if with_zero
                else torch.optim.SGD(ddp.parameters(), lr=0.1)
            )
            with Join([ddp, optimizer] if with_zero else [ddp]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trained(ddp, optimizer, group.rank, steps=3 + group.rank)
            results.append(ddp)
        same(*results)


@pytest.mark.parametrize("where", [pytest.param("inside", marks=pytest.mark.acceptance), "outside"])
@on_ranks(2, kind="gloo")
def test_compiled_models_train_to_the_same_bits(group: Group, torch_world: Callable[..., Any], where: str) -> None:
    def compiled(model: nn.Module) -> Any:
        return torch.compile(model, backend="aot_eager")

    with torch_world(group, "gloo"):
        plain = DDP(mlp())
        inner = DDP(compiled(mlp()) if where == "inside" else mlp())
        model = compiled(inner) if where == "outside" else inner
        trained(plain, torch.optim.SGD(plain.parameters(), lr=0.1), group.rank, steps=5)
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1), group.rank, steps=5)
        same(plain, model)
        assert inner.replica.reducer.steps == 5

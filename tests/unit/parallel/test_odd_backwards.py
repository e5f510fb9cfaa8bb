"""Backwards that are not one `loss.backward()` of all outputs: through autograd.grad, to a leaf, under compiled autograd."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward

import gradwire as gw
from gradwire.errors import GroupAborted, UsageError, UsageRuntimeError
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.rank_tests import on_ranks

FLAGS: list[dict[str, Any]] = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_a_gradient_penalty(
    local_means: Callable[..., Any], assert_gradients: Callable[..., None], flags: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        x = torch.full((2, 3), float(rank + step + 1), requires_grad=True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.sum() + slope.pow(2).sum()

    def rank_main(group: Group) -> None:
        ddp = DDP(copy.deepcopy(model), process_group=group, **flags)
        for step in range(5):
            ddp.zero_grad()
            expected = local_means(group, ddp.module, lambda m, step=step: loss(m, group.rank, step))
            loss(ddp, group.rank, step).backward()
            assert_gradients(ddp.module, expected)
        assert ddp.replica.reducer.steps == 5

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
@pytest.mark.parametrize("where", ["in the loss", "in the model", "in its arguments"])
def test_a_backward_imported_by_name_that_fails_fails_the_step_on_all_ranks(flags: dict[str, Any], where: str) -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("here")

    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), process_group=group, **flags)

        def take(step: int) -> None:
            out = ddp(torch.full((2, 3), float(group.rank + step + 1)))
            loss = out.square().sum()
            if step == 3 and group.rank == 1:
                if where == "in its arguments":
                    loss = out  # not a scalar
                else:
                    (loss if where == "in the loss" else out).register_hook(fail)
            backward(loss)

        for step in range(6):
            ddp.zero_grad()
            if step == 3:
                with pytest.raises((KeyError, RuntimeError, GroupAborted), match="here|scalar outputs"):
                    take(step)
                continue
            take(step)
            for p in ddp.parameters():
                total = p.grad.clone()  # type: ignore[union-attr]
                group.all_reduce(total)
                torch.testing.assert_close(total, p.grad * group.size)  # type: ignore[operator]

    run_ranks(rank_main, 2)


class ReturnsItsScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.scale, self.scale, x


@on_ranks(1)
def test_a_model_that_returns_a_parameter_gathers_no_hooks(group: Group) -> None:
    ddp = DDP(ReturnsItsScale(), process_group=group)
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(40):
        ddp.zero_grad()
        ddp(x)[0].sum().backward()
    for leaf in (ddp.module.scale, x):
        assert len(leaf._backward_hooks or ()) <= 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps_before", [0, 15])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")
def test_compiled_autograd_is_refused_before_it_begins(flags: dict[str, Any], steps_before: int) -> None:
    from torch._dynamo import compiled_autograd

    def rank_main(group: Group) -> None:
        ddp = DDP(nn.Linear(2, 2), process_group=group, **flags)

        def loss() -> Tensor:
            ddp.zero_grad()
            return ddp(torch.ones(1, 2)).sum()

        for _ in range(steps_before):
            loss().backward()
        with (
            compiled_autograd._enable(torch.compile(backend="eager")),
            pytest.raises(UsageRuntimeError, match="under compiled autograd"),
        ):
            loss().backward()
        loss().backward()
        assert ddp.replica.reducer.steps == steps_before + 1

    run_ranks(rank_main, 1)


@on_ranks(1)
def test_a_transform_of_torch_func_is_refused(group: Group) -> None:
    ddp = DDP(nn.Linear(2, 1), process_group=group)
    parameters = {name: p.detach() for name, p in ddp.named_parameters()}
    with pytest.raises(UsageError, match="Call backward"):
        torch.func.grad(lambda own: torch.func.functional_call(ddp, own, torch.ones(1, 2)).sum())(parameters)


def test_init_is_refused_in_an_elastic_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_MEMBER", "h-1-0")
    with pytest.raises(UsageError, match=r"which gw\.elastic\(\) alone follows"):
        gw.init()

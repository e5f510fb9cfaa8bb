"""Parameters that are replaced after wrapping, and backwards that reach no parameter: an error by name, never a local step."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import GroupAborted, LayoutError, Unfinished
from gradwire.groups import Group
from gradwire.hooks import chain, error_feedback, quantize
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.policies import NonFinite
from helpers.rank_tests import on_ranks

FLAGS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
]
flagged = pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags) or "plain")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.skipped = False

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.skipped else self.second(self.first(x))


def step(ddp: nn.Module, rank: int) -> None:
    ddp.zero_grad()
    dtype = next(ddp.parameters()).dtype
    ddp(torch.full((2, 3), rank + 1.0, dtype=dtype, requires_grad=True)).square().sum().backward()


@flagged
@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
@on_ranks(2)
def test_a_replaced_parameter_is_named_before_the_optimizer_steps(
    group: Group, flags: dict[str, Any], everything: bool, steps: int
) -> None:
    ddp = DDP(Model(), process_group=group, **flags)
    for _ in range(steps):
        step(ddp, group.rank)
    for layer in (ddp.module.first, ddp.module.second) if everything else (ddp.module.second,):
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.bias = nn.Parameter(layer.bias.detach().clone())
    with pytest.raises((LayoutError, GroupAborted), match=r"parameter (first|second)\.weight has been replaced"):
        step(ddp, group.rank)


@flagged
@pytest.mark.parametrize("steps", [0, 3])
@on_ranks(2)
def test_a_replaced_first_parameter_is_named(group: Group, flags: dict[str, Any], steps: int) -> None:
    """It is not taken for one of `functional_call`."""
    ddp = DDP(Model(), process_group=group, **flags)
    for _ in range(steps):
        step(ddp, group.rank)
    ddp.module.first.weight = nn.Parameter(ddp.module.first.weight.detach().clone())
    with pytest.raises((LayoutError, GroupAborted), match=r"parameter first\.weight has been replaced"):
        step(ddp, group.rank)


@flagged
@pytest.mark.parametrize("steps", [0, 3])
@on_ranks(2)
def test_a_part_that_was_converted_and_back_is_named(group: Group, flags: dict[str, Any], steps: int) -> None:
    ddp = DDP(Model(), process_group=group, **flags)
    for _ in range(steps):
        step(ddp, group.rank)
    ddp.module.second.double().float()
    with pytest.raises((LayoutError, GroupAborted), match=r"parameter second\.weight, second\.bias was converted"):
        step(ddp, group.rank)


@pytest.mark.parametrize("flags", FLAGS[:3], ids=lambda flags: " ".join(flags) or "plain")
@on_ranks(2)
def test_a_backward_that_reaches_no_parameter_on_one_rank_fails_the_step(group: Group, flags: dict[str, Any]) -> None:
    ddp = DDP(Model(), process_group=group, **flags)
    for _ in range(3):
        step(ddp, group.rank)
    ddp.module.skipped = group.rank == 1
    with pytest.raises((Unfinished, GroupAborted, RuntimeError), match=r"first\.weight, first\.bias, second\.weight"):
        step(ddp, group.rank)
    ddp.module.skipped = False
    step(ddp, group.rank)  # recovers
    mine = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
    theirs = mine.clone()
    group.all_reduce(theirs)
    assert torch.equal(mine, theirs / group.size)


@on_ranks(2)
def test_where_unused_parameters_are_allowed_it_sends_zeros(group: Group) -> None:
    ddp = DDP(Model(), process_group=group, find_unused_parameters=True)
    for number in range(4):
        ddp.module.skipped = group.rank == 1 and number % 2 == 1
        step(ddp, group.rank)
        other = [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        assert len(other) == 4
        for grad in other:
            total = grad.clone()
            group.all_reduce(total)
            assert torch.equal(total, grad * group.size)
    assert ddp.replica.reducer.steps == 4


@on_ranks(2)
def test_a_model_that_is_frozen_for_a_backward_is_left_alone(group: Group) -> None:
    ddp = DDP(Model(), process_group=group)
    for _ in range(3):
        ddp.requires_grad_(False)
        step(ddp, group.rank)  # trains what is before this model, as a generator before a discriminator
        ddp.requires_grad_(True)
        step(ddp, group.rank)
    assert ddp.replica.reducer.steps == 3


@pytest.mark.parametrize("nonfinite", list(NonFinite))
@pytest.mark.filterwarnings("ignore:averaging gradients")
@on_ranks(2)
def test_a_converted_model_keeps_its_checks_and_its_hook(group: Group, nonfinite: NonFinite) -> None:
    hook = chain(error_feedback(), quantize(bits=8))
    ddp = DDP(Model(), process_group=group, nonfinite=nonfinite)
    ddp.set_hook(hook)
    for number in range(6):
        if number == 3:
            ddp.double()
        step(ddp, group.rank)
        for p in ddp.parameters():
            assert p.grad is not None
            assert p.grad.dtype is p.dtype
            total = p.grad.clone()
            group.all_reduce(total)
            assert torch.allclose(total, p.grad * group.size)
    assert ddp.replica.reducer.steps == 6
    assert ddp.replica.hook is hook


@on_ranks(2)
def test_a_model_that_one_rank_converts_is_refused(group: Group) -> None:
    ddp = DDP(Model(), process_group=group)
    step(ddp, group.rank)
    if group.rank == 1:
        ddp.double()
    with pytest.raises(Exception, match=r"compare parameters|bucket"):
        step(ddp, group.rank)

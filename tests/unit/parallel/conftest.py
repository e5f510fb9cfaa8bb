"""What a step of data-parallel training must give: the average of what each rank would have got alone."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from gradwire.groups import Group, ThreadGroup
from helpers.late_checks import emulate_device as emulate_device

Loss = Callable[[nn.Module], Tensor]


def _mean_of_local_gradients(group: Group, model: nn.Module, loss: Loss) -> dict[str, Tensor | None]:
    """Backward on a copy without any hook of ours, then averaged over the ranks the plain way."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    loss(alone).backward()
    means: dict[str, Tensor | None] = {}
    for name, parameter in alone.named_parameters():
        has = torch.tensor([float(parameter.grad is not None)])
        group.all_reduce(has)
        total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense().clone()
        group.all_reduce(total)
        means[name] = None if has.item() == 0 else total.detach() / group.size
    return means


def _assert_gradients(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for name, parameter in model.named_parameters():
        grad, want = parameter.grad, expected[name]
        if want is None:
            assert grad is None, name
        else:
            assert grad is not None, name
            torch.testing.assert_close(grad.to_dense(), want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def group() -> Iterator[Group]:
    """A group of one rank."""
    (group,) = ThreadGroup.world(1, timeout=20)
    yield group
    group.close()


@pytest.fixture(scope="session")
def local_means() -> Callable[..., dict[str, Tensor | None]]:
    """`local_means(group, module, loss)`: what every rank's gradients must be after `loss` on the replicated module."""
    return _mean_of_local_gradients


@pytest.fixture(scope="session")
def assert_gradients() -> Callable[..., None]:
    """`assert_gradients(module, expected)`."""
    return _assert_gradients


@pytest.fixture(scope="session", autouse=True)
def _convolution_opened_its_file() -> None:
    """The first convolution makes oneDNN open a file that it keeps for life: nobody's leftover."""
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(
        memory_format=torch.channels_last
    )
    convolutions(torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum().backward()

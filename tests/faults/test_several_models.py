"""Several models on one group: one backward may reach them all, and the first to be used recovers from a failed step of another."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import GroupAborted
from gradwire.groups import Group
from gradwire.hooks import CommHook, chain, error_feedback, mean, quantize, random_k
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks
from helpers.backward_calls import in_backward

FAILING = 3


def fail() -> None:
    raise ValueError("of the user's own")


_Q8 = chain(error_feedback(), quantize())


@pytest.mark.parametrize("kind", ["threads", "shared_memory", "gloo"])
@pytest.mark.parametrize("hooks", [(_Q8, _Q8), (mean(), _Q8), (_Q8, mean())], ids=["both", "second", "first"])
def test_one_backward_of_two_models_whose_hooks_communicate_several_times(
    kind: str, hooks: tuple[CommHook, CommHook]
) -> None:
    """The n-th collectives of all ranks meet, whichever model's they are."""
    towers = [nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))) for _ in hooks]

    def train(group: Group) -> list[list[Tensor]]:
        trained: list[list[Tensor]] = [[], []]
        for together in (False, True):
            models = [DDP(copy.deepcopy(tower), process_group=group, bucket_cap_mb=0.001) for tower in towers]
            for model, hook in zip(models, hooks, strict=True):
                model.set_hook(hook)
            for step in range(20):
                data = torch.Generator().manual_seed(100 * step + group.rank)
                losses = [model(torch.randn(2, 16, generator=data)).square().mean() for model in models]
                for loss in [sum(losses)] if together else losses:
                    loss.backward()
                trained[together] += [p.grad.clone() for model in models for p in model.parameters()]
        return trained

    for apart, together in run_ranks(train, 2, kind=kind):
        assert all(map(torch.equal, apart, together))


@pytest.mark.filterwarnings("ignore:rank . had finished step")
@pytest.mark.parametrize("often", ["generator", "discriminator"])
def test_a_failure_costs_one_iteration_when_models_make_different_numbers_of_steps(often: str) -> None:
    def train(group: Group) -> list[str]:
        generator, discriminator = (DDP(nn.Linear(2, 2), process_group=group) for _ in range(2))
        more = {"generator": generator, "discriminator": discriminator}[often]
        log = []
        for iteration in range(FAILING + 4):
            armed = fail if iteration == FAILING and group.rank == 0 else None
            try:
                fake = generator(torch.ones(1, 2))
                fake.sum().backward()
                for _ in range(3):
                    in_backward(more(torch.ones(1, 2)), armed).sum().backward()
                discriminator(fake.detach()).sum().backward()
                log.append("ok")
            except (ValueError, GroupAborted) as error:
                log.append(type(error).__name__)
        return log

    for rank, log in enumerate(run_ranks(train, 2)):
        lost = "ValueError" if rank == 0 else "GroupAborted"
        assert log == ["ok"] * FAILING + [lost] + ["ok"] * 3


@pytest.mark.filterwarnings("ignore:rank . had finished step")
def test_a_model_whose_group_another_one_recovered_starts_over_too() -> None:
    launched = threading.Event()

    def wait_and_fail() -> None:
        assert launched.wait(100)
        fail()

    def train(group: Group) -> list[Tensor]:
        torch.manual_seed(0)
        first = DDP(nn.Linear(2, 2), process_group=group)
        layers = [nn.Linear(16, 16) for _ in range(2)]
        second = DDP(nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.0001)
        second.set_hook(chain(random_k(ratio=0.25), mean()))  # its choice depends on the number of the step
        middle: list[Any] = [None]
        layers[0].register_forward_hook(lambda module, inputs, output: in_backward(output, middle[0]))
        for iteration in range(FAILING + 2):
            failing = iteration == FAILING
            middle[0] = launched.set if failing and group.rank == 1 else None
            armed = wait_and_fail if failing and group.rank == 0 else None
            first.zero_grad()
            second.zero_grad()
            x = torch.rand(2, 16, generator=torch.Generator().manual_seed(10 * iteration + group.rank))
            try:
                first(x[:, :2]).sum().backward()
                in_backward(second(x), armed).pow(2).sum().backward()
                assert not failing
            except (ValueError, GroupAborted):
                assert failing
        return [p.grad for p in second.parameters() if p.grad is not None]

    mine, others = run_ranks(train, 2)
    assert len(mine) == 4
    for a, b in zip(mine, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)

"""Another hook between steps, or other settings on resume: what is owed stays owed, or is sent. Nothing of a gradient is lost."""

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import hooks
from gradwire.errors import HookError
from gradwire.groups import Group
from gradwire.hooks import CommHook, after, chain, error_feedback, every, mean, partition, power_sgd, quantize, top_k
from gradwire.hooks.base import Trait
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.reducer.hook.hook_states import HookStates, from_dict, to_dict
from gradwire.testing import run_ranks

NET = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
FED = chain(error_feedback(), top_k(ratio=0.1))


def total_of(each: list[CommHook], steps: int = 5, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """(delivered, mean of all gradients) by rank, over `steps` steps with each hook."""

    def rank_main(group: Group) -> tuple[Tensor, Tensor]:
        model, plain = copy.deepcopy(NET), copy.deepcopy(NET)
        ddp = DDP(model, process_group=group, bucket_cap_mb=0.0002, **options)
        data = torch.Generator().manual_seed(group.rank)
        delivered = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
        brought = torch.zeros_like(delivered)
        for hook in each:
            ddp.set_hook(hook)
            for _ in range(steps):
                inputs = torch.randn(4, 8, generator=data)
                for net, into in ((ddp, delivered), (plain, brought)):
                    net.zero_grad()
                    net(inputs).pow(2).sum().backward()
                    into += torch.cat([p.grad.flatten().double() for p in net.parameters()])
        group.all_reduce(brought)
        ddp.replica.detach()
        return delivered, brought / group.size

    return run_ranks(rank_main, 2, kind="threads")


@pytest.mark.parametrize(
    "first",
    [
        FED,
        chain(hooks.clip(value=1e9), error_feedback(), quantize(bits=2, block=32)),
        chain(error_feedback(), hooks.random_k(ratio=0.2), mean()),
        chain(error_feedback(), power_sgd(rank=1, min_compression=1)),
        every(3, mean()),
        every(2, FED, otherwise=chain(error_feedback(), hooks.threshold(relative=0.5))),
        hooks.dgc(0.1, momentum=0.0),
        after(2, FED),
        partition({"0.*": FED, "*": every(3, mean())}),
        hooks.by_size(numel=20, large=FED, small=mean()),
    ],
    ids=repr,
)
def test_what_a_hook_owed_is_sent_with_the_next_gradients(first: CommHook) -> None:
    for delivered, brought in total_of([first, mean()]):
        torch.testing.assert_close(delivered, brought, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gradients", ["copies", "views"])
def test_what_is_owed_stays_owed_under_other_settings(gradients: str) -> None:
    """The residual goes over to each next hook, and with the last one everything is delivered."""
    each = [FED, chain(error_feedback(), top_k(ratio=0.01)), chain(error_feedback(), quantize(bits=2)), mean()]
    for delivered, brought in total_of(each, gradient_as_bucket_view=gradients == "views"):
        torch.testing.assert_close(delivered, brought, rtol=1e-4, atol=1e-4)


def states_of(hook: CommHook, *, step: int = 7) -> HookStates:
    """With all states that it makes for one bucket."""
    states = HookStates(hook, step=step)
    states.of(SPEC)
    return states


SPEC = hooks.BucketSpec(0, ("a", "b"), ((2, 3), (4,)), ((3, 1), (1,)), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FED, chain(error_feedback(), top_k(ratio=0.9, values=torch.bfloat16))),
        (FED, chain(hooks.clip(norm=2.0), error_feedback(), quantize(bits=4))),
        (hooks.dgc(0.1), hooks.dgc(0.5, momentum=0.5, warmup_steps=100)),
        (every(3, mean()), every(5, chain(hooks.cast(torch.bfloat16), mean()))),
        (power_sgd(rank=1), power_sgd(rank=2)),
        (after(3, FED), after(3, chain(error_feedback(), quantize(bits=8)))),
        (hooks.decoupled_momentum(decay=0.9), hooks.decoupled_momentum(decay=0.99)),
        (hooks.diloco(every=4), hooks.diloco(every=8, outer_lr=0.5)),
        (partition({"a": mean(), "*": FED}), partition({"a": quantize(bits=8), "*": FED})),
        (mean(), quantize(bits=8)),
    ],
    ids=repr,
)
def test_hooks_of_one_structure_take_each_others_states(one: CommHook, other: CommHook) -> None:
    assert one.structure == other.structure
    states = states_of(one)
    for taken in (states.transfer_to(other, step=9), from_dict(to_dict(states, rank=0, step=9), other, rank=0)):
        assert taken.steps == 9
        assert taken.hook is other
        taken.of(SPEC)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FED, mean()),
        (FED, hooks.dgc(0.1)),
        (after(3, FED), after(4, FED)),
        (partition({"a": mean(), "*": FED}), partition({"b": mean(), "*": FED})),
        (chain(error_feedback(), power_sgd(rank=2)), FED),
        (mean(), hooks.local_sgd(every=2)),
        (every(2, mean()), every(2, mean(), otherwise=quantize(bits=8))),
    ],
    ids=repr,
)
def test_other_structures_start_at_step_0_and_are_not_loaded(one: CommHook, other: CommHook) -> None:
    assert one.structure != other.structure
    states = states_of(one)
    assert states.transfer_to(other, step=9).steps == 0
    with pytest.raises(HookError, match=r"Settings may differ, hooks may not"):
        from_dict(to_dict(states, rank=0, step=9), other, rank=0)


def test_what_is_owed_is_saved_until_it_is_sent() -> None:
    states = states_of(FED)
    states.of(SPEC)["residual"].fill_(2.0)
    owing = states.transfer_to(mean(), step=3)
    again = from_dict(to_dict(owing, rank=1, step=0), mean(), rank=1)
    elsewhere = from_dict(to_dict(owing, rank=1, step=0), mean(), rank=0)
    gradient = torch.ones(10)
    again.begin(SPEC, gradient)
    again.begin(SPEC, gradient)
    assert gradient.tolist() == [3.0] * 10
    assert (again.owed, elsewhere.owed) == ({}, {})
    assert owing.transfer_to(FED, step=0).owed.keys() == {"a", "b"}


class Hoarder(CommHook):
    """Sends nothing, and cannot tell what it owes."""

    traits = Trait.REMEMBERS

    def init(self, spec: hooks.BucketSpec) -> list[Tensor]:
        return []

    def reduce(self, grad: Tensor, state: Any, turn: hooks.Turn) -> hooks.Reduction:
        state.append(grad.clone())
        return hooks.Reduced(torch.zeros_like(grad), torch.zeros_like(grad))
        yield

    def save(self, state: Any, spec: hooks.BucketSpec) -> dict[str, Any]:
        return dict.fromkeys(spec.names, 1)

    def load(self, saved: Mapping[str, Any], spec: hooks.BucketSpec) -> Any:
        return []


def test_a_hook_that_cannot_return_what_it_owes_warns() -> None:
    with pytest.warns(UserWarning, match=r"mean\(\) takes the place of .*Hoarder.* they are dropped"):
        states_of(Hoarder()).transfer_to(mean(), step=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        states_of(Hoarder()).transfer_to(Hoarder(), step=1)
        states_of(chain(hooks.add_noise(std=1.0), quantize(bits=8))).transfer_to(mean(), step=1)


def test_the_warning_names_the_line_that_set_the_hook(group: Group) -> None:
    model = nn.Linear(2, 1)
    replica = replicate(model, group=group, hook=Hoarder())
    model(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match="they are dropped") as caught:
        replica.set_hook(mean())
    assert caught[0].filename == __file__
    replica.detach()


def test_diloco_goes_on_under_other_settings() -> None:
    def rank_main(group: Group) -> tuple[int, Tensor, Tensor]:
        ddp = DDP(nn.Linear(8, 4), process_group=group)
        ddp.set_hook(hooks.diloco(every=2, outer_momentum=0.9))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp.attach_optimizer(optimizer)
        for _ in range(3):
            ddp(torch.full((2, 8), 1.0 + group.rank)).sum().backward()
            optimizer.step()
        before = ddp.hook_state_dict()
        ddp.set_hook(hooks.diloco(every=4, outer_momentum=0.9))
        later = ddp.hook_state_dict()
        return later["step"], before["state"]["weight"]["momentum"], later["state"]["weight"]["momentum"]

    for step, before, now in run_ranks(rank_main, 2, kind="threads"):
        assert step == 3
        assert bool(before.any())
        assert torch.equal(before, now)

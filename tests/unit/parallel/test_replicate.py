"""The function form: the module itself is not wrapped."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.errors import UsageError
from gradwire.groups import Group, Recording
from gradwire.hooks import cast, chain, mean
from gradwire.parallel import replicate
from gradwire.policies import Buckets, Gradients, Graph
from gradwire.testing import run_ranks
from helpers.models import inputs, mlp
from helpers.rank_tests import on_ranks
from helpers.through_file import through_file

POLICIES: list[dict[str, Any]] = [
    {},
    {"gradients": Gradients.COPIES},
    {"graph": Graph.FIND_UNUSED},
    {"graph": Graph.STATIC},
    {"buckets": Buckets((64,), from_start=True)},
    {"hook": mean()},
]


@pytest.mark.parametrize("policies", POLICIES, ids=lambda policies: " ".join(map(str, policies.values())) or "default")
def test_gradients_are_averaged(local_means: Any, assert_gradients: Any, policies: dict[str, Any]) -> None:
    model = mlp()

    def rank_main(group: Group) -> None:
        mine = copy.deepcopy(model)
        replica = replicate(mine, group=group, **policies)
        for step in range(3):
            expected = local_means(group, mine, lambda m, step=step: m(inputs(group.rank, step)).pow(2).sum())
            mine.zero_grad()
            mine(inputs(group.rank, step)).pow(2).sum().backward()
            assert_gradients(mine, expected)
        assert replica.reducer.steps == 3
        replica.detach()

    run_ranks(rank_main, 2)


def test_the_module_keeps_its_type_its_names_and_its_state_dict(group: Group) -> None:
    model = mlp()
    names, kind = list(model.state_dict()), type(model)
    replica = replicate(model, group=group)
    assert isinstance(model, kind)
    assert repr(type(model)) == repr(kind)
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]
    model.load_state_dict(mlp().state_dict())
    replica.detach()
    assert type(model) is kind


class _Own(nn.Linear):
    """Refuses subclasses, and says itself how it is made."""

    def __init_subclass__(cls) -> None:
        raise TypeError(f"{cls} is final")

    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features), self.__dict__


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "protocol 1", "torch.save"])
@pytest.mark.parametrize("kind", [nn.Linear, _Own])
def test_copies_are_of_the_class_from_before(group: Group, how: str, kind: type[nn.Linear]) -> None:
    model = kind(4, 2)
    replica = replicate(model, group=group)
    copied = pickle.loads(pickle.dumps(model, 1)) if how == "protocol 1" else clone(model, how)
    replica.detach()
    assert type(copied) is type(model) is kind
    assert torch.equal(copied(inputs(0)[:, :4]), model(inputs(0)[:, :4]))


def test_gradients_are_views_of_the_buckets_by_default(group: Group) -> None:
    model = mlp()
    replica = replicate(model, group=group)
    model(inputs(0)).sum().backward()
    buffers = {s.buffer.untyped_storage().data_ptr() for s in replica.reducer.buckets.storages}
    assert {p.grad.untyped_storage().data_ptr() for p in model.parameters()} == buffers
    replica.detach()


@on_ranks(2, wrap=Recording)
def test_detach_gives_an_ordinary_module_back(group: Group) -> None:
    assert isinstance(group, Recording)
    model = mlp()
    replica = replicate(model, group=group)
    model(inputs(group.rank)).sum().backward()
    replica.detach()
    replica.detach()
    sent = len(group.submitted)
    ordinary = copy.deepcopy(model)
    for m in (model, ordinary):
        m.zero_grad()
        m(inputs(group.rank)).sum().backward()
    assert len(group.submitted) == sent
    assert torch.equal(model[0].weight.grad, ordinary[0].weight.grad)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    again = replicate(model, group=group)
    model(inputs(group.rank)).sum().backward()
    assert len(group.submitted) > sent
    again.detach()


def test_replicating_twice_is_an_error(group: Group) -> None:
    model = mlp()
    replica = replicate(model, group=group)
    with pytest.raises(
        UsageError, match=r"replicate\(Sequential\): the module is already replicated. detach\(\) it first."
    ):
        replicate(model, group=group)
    model(inputs(0)).sum().backward()
    assert replica.reducer.steps == 1
    replica.detach()


def test_a_part_of_a_model_may_be_replicated(group: Group) -> None:
    model = mlp()
    replica = replicate(model[2], group=group)
    model(inputs(0)).sum().backward()
    assert replica.names == ["weight", "bias"]
    assert replica.reducer.steps == 1
    replica.detach()


def clone(model: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    return through_file(model, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_an_ordinary_module(group: Group, how: str) -> None:
    """An averaged copy of the weights, say: it must not take part in the original's training."""
    model = mlp()
    replica = replicate(model, group=group)
    for _ in range(4):
        model(inputs(0)).sum().backward()
    copied = clone(model, how)
    model.zero_grad()
    model(inputs(0)).sum().backward()
    copied(inputs(0)).sum().backward()
    assert replica.reducer.steps == 5
    assert all(torch.equal(p, q) for p, q in zip(copied.parameters(), model.parameters(), strict=True))
    own = replicate(copied, group=group)
    copied(inputs(0)).sum().backward()
    assert (own.reducer.steps, replica.reducer.steps) == (1, 5)
    own.detach(), replica.detach()


def test_a_replica_raises_when_its_module_is_gone(group: Group) -> None:
    replica = replicate(mlp(), group=group)
    with pytest.raises(UsageError, match="the replicated module is gone"):
        _ = replica.module


def test_no_sync_and_hooks_are_on_the_replica(group: Group) -> None:
    model = mlp()
    replica = replicate(model, group=group, hook=chain(cast(torch.bfloat16), mean()))
    with replica.no_sync():
        model(inputs(0)).sum().backward()
    assert replica.reducer.steps == 0
    replica.set_hook(mean())
    model(inputs(0)).sum().backward()
    assert replica.reducer.steps == 1
    replica.detach()

"""Saving one rank's parameters while the ranks' differ warns, once, and nothing else does.

Ranks are processes here: warnings are caught for a whole process.
"""

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.groups import Group
from gradwire.hooks import (
    CommHook,
    diloco,
    error_feedback,
    gossip,
    local_sgd,
    mean,
    post_local_sgd,
    streaming_diloco,
    top_k,
)
from gradwire.hooks.dense import chain
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.parallel.module_state import UnequalReplicas
from gradwire.testing import run_ranks
from helpers.rank_tests import on_ranks
from helpers.through_file import through_file

# Which steps, of six, leave the replicas different.
HOOKS: dict[str, tuple[Callable[[], CommHook], set[int]]] = {
    "mean": (mean, set()),
    "top_k": (lambda: chain(error_feedback(), top_k(ratio=0.5)), set()),
    "local_sgd": (lambda: local_sgd(every=2), {1, 3, 5}),
    "diloco": (lambda: diloco(every=3), {1, 2, 4, 5}),
    "post_local_sgd": (lambda: post_local_sgd(start=3, every=2), {4, 6}),
    "streaming_diloco": (lambda: streaming_diloco(every=2, fragments=2), {1, 2, 3, 4, 5, 6}),
    "streaming_diloco, one fragment": (lambda: streaming_diloco(every=2, fragments=1), {1, 3, 5}),
    "streaming_diloco, delayed": (lambda: streaming_diloco(every=3, fragments=1, delay=1), {1, 2, 3, 4, 5, 6}),
    "gossip": (lambda: gossip(), {1, 2, 3, 4, 5, 6}),
}


def warned(save: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save()
    return [str(w.message) for w in caught if issubclass(w.category, UnequalReplicas)]


def step(model: nn.Module, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()
    model(torch.full((1, 4), rank + 1.0)).pow(2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "ddp") for name in HOOKS), *itertools.product(("diloco", "gossip"), ("module of ddp", "replicate"))],
)
def test_a_warning_exactly_when_replicas_differ(name: str, form: str) -> None:
    hook, unequal = HOOKS[name]

    def rank_main(group: Group) -> set[int]:
        found = set()
        for last in range(7):  # the warning is given once, so every number of steps needs a separate model
            inner = nn.Sequential(nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False))
            model: Any = inner
            if form == "replicate":
                handle: Any = replicate(inner, group=group, hook=hook())
            else:
                handle = model = DDP(inner, process_group=group)
                handle.set_hook(hook())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            handle.attach_optimizer(optimizer)
            for _ in range(last):
                step(model, optimizer, group.rank)
            saved = model if form == "ddp" else inner
            warning_texts = warned(saved.state_dict)
            if warning_texts:
                assert len(warning_texts) == 1
                assert "average_parameters()" in warning_texts[0]
                assert not warned(saved.state_dict)
                found.add(last)
        return found

    assert run_ranks(rank_main, 3, kind="shared_memory") == [unequal] * 3


@on_ranks(2, kind="shared_memory")
def test_averaging_first_or_another_hook_or_detaching_ends_it(group: Group) -> None:
    def trained() -> Any:
        model = nn.Linear(4, 2)
        replica = replicate(model, group=group, hook=local_sgd(every=4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica.attach_optimizer(optimizer)
        step(model, optimizer, group.rank)
        return model, replica

    model, replica = trained()
    replica.average_parameters()
    assert not warned(model.state_dict)
    model, replica = trained()
    replica.set_hook(mean())
    assert not warned(model.state_dict)
    assert not model._state_dict_pre_hooks
    model, replica = trained()
    replica.detach()
    assert not warned(model.state_dict)


@on_ranks(2, kind="shared_memory")
def test_a_copy_of_the_module_is_an_ordinary_one(group: Group) -> None:
    model = nn.Linear(4, 2)
    replica = replicate(model, group=group, hook=local_sgd(every=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    replica.attach_optimizer(optimizer)
    step(model, optimizer, group.rank)
    for copied in (copy.deepcopy(model), through_file(model, weights_only=False)):
        assert not warned(copied.state_dict)

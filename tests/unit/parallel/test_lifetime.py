"""A model that is dropped is freed at once, by counting references; hundreds of steps leave nothing behind."""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.groups import C10dGroup, Group, ThreadGroup
from gradwire.hooks import CommHook, Reduction, Turn, cast, chain, mean
from gradwire.parallel import DistributedDataParallel as DDP, replicate
from gradwire.policies import Graph, ScaleCheck
from helpers.futures import done
from helpers.growth import STEPS, WARM, assert_nothing_grew, grown, small, steps


@pytest.fixture(scope="module", autouse=True)
def _checkpoint_was_imported() -> None:
    """The first checkpoint imports half of torch, and what is caught and kept there holds the frames of its callers."""
    checkpoint(nn.Linear(2, 2), torch.ones(1, 2), use_reentrant=False)


class Laned(CommHook):
    """The mean on the lane, so that a thread is at work."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return (yield from mean().reduce(grad, state, turn))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.norm, self.first(x), use_reentrant=False))


def in_torchs_form(state: Any, bucket: Any) -> Any:
    return done(bucket.buffer())


def wrapped(group: Group, **flags: Any) -> nn.Module:
    return DDP(Model(), process_group=group, **flags)


def hooked(group: Group, hook: Any, module: nn.Module | None = None) -> nn.Module:
    model = DDP(module or Model(), process_group=group)
    model.register_comm_hook(None, hook)
    return model


def replicated(group: Group, **policies: Any) -> nn.Module:
    model = Model()
    replicate(model, group=group, **policies)
    return model


def delayed(group: Group) -> nn.Module:
    model = Model()
    late = [(n, p) for n, p in model.named_parameters() if n.startswith("last")]
    return DDP(
        model, process_group=group, delay_all_reduce_named_params=late, param_to_hook_all_reduce=model.last.weight
    )


MODELS: dict[str, Callable[[Group], nn.Module]] = {
    "ddp": wrapped,
    "ddp views": lambda group: wrapped(group, gradient_as_bucket_view=True),
    "ddp finding unused": lambda group: wrapped(group, find_unused_parameters=True),
    "ddp static": lambda group: wrapped(group, static_graph=True),
    "ddp with a hook of torch's form": lambda group: hooked(group, in_torchs_form),
    "ddp on the lane": lambda group: hooked(group, Laned()),
    "ddp with delayed all-reduce": delayed,
    "replicate": replicated,
    "replicate finding unused": lambda group: replicated(group, graph=Graph.FIND_UNUSED),
    "replicate static": lambda group: replicated(group, graph=Graph.STATIC),
    "replicate cast and checked": lambda group: replicated(
        group, hook=chain(cast(torch.bfloat16), mean()), scale_check=ScaleCheck()
    ),
    "replicate on the lane": lambda group: replicated(group, hook=Laned()),
}


@contextmanager
def thread_group() -> Iterator[Group]:
    (group,) = ThreadGroup.world(1, timeout=20)
    with group:
        yield group


@contextmanager
def gloo_group() -> Iterator[Group]:
    with C10dGroup.gloo(dist.HashStore(), 0, 1, timeout=20) as group:
        yield group


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("make_group", [thread_group, gloo_group])
@pytest.mark.parametrize("kind", MODELS)
def test_a_dropped_model_is_freed_at_once(make_group: Any, kind: str) -> None:
    with make_group() as group:
        model = MODELS[kind](group)
        steps(model, 3)
        gone = [weakref.ref(model), weakref.ref(next(iter(model.parameters())))]
        if isinstance(model, DDP):
            gone += [weakref.ref(model.module), weakref.ref(model.replica), weakref.ref(model.replica.reducer)]
        del model
        assert [weak() for weak in gone] == [None] * len(gone)


@pytest.mark.usefixtures("no_gc")
def test_a_model_whose_step_failed_is_freed_at_once() -> None:
    with thread_group() as group:
        model = DDP(Model(), process_group=group)

        def angry(state: Any, bucket: Any) -> Any:
            raise ValueError("no")

        model.register_comm_hook(None, angry)
        with pytest.raises(ValueError, match="no"):
            steps(model, 1)
        weak = weakref.ref(model)
        del model
        assert weak() is None


@pytest.mark.usefixtures("no_gc")
def test_a_model_dropped_between_forward_and_backward_does_no_harm() -> None:
    with thread_group() as group:
        model = replicated(group)
        loss = model(torch.ones(2, 4)).sum()
        weak = weakref.ref(model)
        del model
        assert weak() is None
        loss.backward()


def small_on_the_lane(group: Group) -> nn.Module:
    model = nn.Linear(4, 2)
    replicate(model, group=group, hook=Laned(), graph=Graph.STATIC)
    return model


SMALL: dict[str, Callable[[Group], nn.Module]] = {
    "views": lambda group: small(group, gradient_as_bucket_view=True),
    "finding unused": lambda group: small(group, find_unused_parameters=True),
    "on the lane": small_on_the_lane,
}


@pytest.mark.parametrize("kind", SMALL)
def test_hundreds_of_steps_leave_nothing_behind(kind: str) -> None:
    with thread_group() as group:
        assert_nothing_grew(grown(lambda: SMALL[kind](group)))


def test_a_leak_of_one_block_a_step_is_seen() -> None:
    kept: list[float] = []

    class Keeping(CommHook):
        """Keeps one number a step, which is one block."""

        def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
            kept.append(time.perf_counter())
            return (yield from mean().reduce(grad, state, turn))

    with thread_group() as group:
        more = grown(lambda: hooked(group, Keeping(), nn.Linear(4, 2)))
    assert len(kept) == WARM + 2 * STEPS
    assert 0.9 * STEPS < more["blocks"] < 1.1 * STEPS
    with pytest.raises(AssertionError):
        assert_nothing_grew(more)

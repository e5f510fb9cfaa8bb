"""LAST_PER_BUCKET: once a step has shown which gradients launch buckets, the others only note that they came.

That is how it is on CUDA, and on the CPU in programs whose steps are not plain; here every one is taken for such a program.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.errors import ReadyTwice, Unfinished
from gradwire.events import BucketLaunched, GradientReady
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import GradBucket
from gradwire.parallel import replicate
from gradwire.parallel.replica import Replica
from gradwire.policies import Buckets, Gradients

X = torch.arange(8.0).view(2, 4) / 8


class Branches(nn.Module):
    """Two stages whose order, and whether each takes part, can be chosen at every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, order: str = "ab", *, again: bool = False) -> Tensor:
        for name in order:
            x = getattr(self, name)(x)
        if again:  # twice in one backward: each checkpoint accumulates in a graph task of its own
            x = checkpoint(self.a, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)
        return x


@pytest.fixture
def group() -> Iterator[Group]:
    (only,) = ThreadGroup.world(1)
    yield only
    only.close()


@pytest.fixture(params=[(1 << 30,), (1,)], ids=["one bucket", "a bucket each"])
def model(request: pytest.FixtureRequest, group: Group) -> Branches:
    """A model whose next step calls once per bucket."""
    module = Branches()
    replica = replicate(module, group=group, buckets=Buckets(request.param), gradients=Gradients.COPIES)
    replica.reducer.may_poll = False
    for _ in range(3):
        step(module)
    return module


def replica_of(module: nn.Module) -> Replica:
    replica: Replica = module._gradwire_replica  # type: ignore[assignment]
    return replica


def step(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    module.zero_grad()
    module(X, *args, **kwargs).square().sum().backward()


def assert_right(module: Branches, *args: Any, **kwargs: Any) -> None:
    alone = Branches()
    alone.load_state_dict(module.state_dict())
    step(alone, *args, **kwargs)
    for (name, p), q in zip(module.named_parameters(), alone.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]


def test_only_gradients_that_launched_call_the_reducer(model: Branches, calls: Callable[[], list[int]]) -> None:
    reducer = replica_of(model).reducer
    before = reducer.order.last_arrival
    seen = calls()
    step(model)
    assert len(seen) == len(reducer.layout.members)
    assert set(seen) == {members[-1] for members in reducer.layout.members}
    assert reducer.order.last_arrival == before
    assert reducer.steps == 4
    assert_right(model)


def test_a_listener_hears_of_every_gradient(model: Branches) -> None:
    reducer, events = replica_of(model).reducer, []
    with reducer.events.listen(events.append):
        step(model)
    assert [e.index for e in events if isinstance(e, GradientReady)] == reducer.order.last_arrival
    assert sorted(reducer.order.last_arrival) == [0, 1, 2, 3]
    step(model)
    assert reducer.steps == 5


def test_another_order_is_noticed_at_the_first_gradient_that_launches_nothing(
    model: Branches, calls: Callable[[], list[int]]
) -> None:
    reducer = replica_of(model).reducer
    seen = calls()
    step(model, "ba")
    assert reducer.steps == 4
    assert_right(model, "ba")
    assert reducer.order.last_arrival == [1, 0, 3, 2]
    assert reducer.order.last_arrival[-1] in seen
    seen.clear()
    step(model, "ba")  # by now it is the order to expect
    assert len(seen) < len(reducer.order.last_arrival) or len(reducer.layout.members) > 1
    assert reducer.steps == 5
    assert_right(model, "ba")


def test_buckets_are_launched_before_backward_ends(group: Group) -> None:
    module, launched = Branches(), []
    replica = replicate(module, group=group, buckets=Buckets((1,)))
    replica.reducer.may_poll = False
    start = replica.runner.start

    def spy(bucket: GradBucket) -> Any:
        launched.append((bucket.index(), [i for i, p in enumerate(module.parameters()) if p.grad is not None]))
        return start(bucket)

    step(module)  # in one bucket, as the order is not known yet
    for order in ("ab", "ab", "ab", "ba", "ba", "ab"):
        launched.clear()
        replica.runner.start = spy  # type: ignore[method-assign]
        step(module, order)
        replica.runner.start = start  # type: ignore[method-assign]
        assert [number for number, _ in launched] == [0, 1, 2, 3]
        if order == "ab":
            assert [len(there) for _, there in launched] == [1, 2, 3, 4]  # each as soon as its gradient is there
        assert_right(module, order)


def test_a_parameter_without_gradient_is_named_in_the_next_step(model: Branches) -> None:
    replica = replica_of(model)
    step(model, "b")  # reaches no parameter of `a`
    assert replica.reducer.steps == 3
    with pytest.raises(Unfinished, match=r"a\.weight, a\.bias"):
        step(model)


def test_check_finished_knows_of_gradients_that_came_quietly(model: Branches) -> None:
    step(model, "b")
    with pytest.raises(Unfinished, match=r"a\.weight, a\.bias"):
        replica_of(model).check_finished()


def test_a_gradient_that_comes_twice_is_an_error(model: Branches) -> None:
    with pytest.raises(ReadyTwice, match=r"a\.(weight|bias)"):
        step(model, "ab", again=True)


def test_what_comes_under_no_sync_is_not_counted(model: Branches) -> None:
    replica = replica_of(model)
    model.zero_grad()
    for order in ("ab", "b", "b"):
        with replica.no_sync():
            model(X, order).square().sum().backward()
    assert len(replica.reducer.listener.arrived) <= 4
    model(X).square().sum().backward()
    assert replica.reducer.steps == 4
    assert replica.reducer.listener.arrived == []


def test_a_backward_that_raised_has_failed_the_step(model: Branches) -> None:
    class Raised(Exception):
        pass

    def fail(_: Tensor) -> None:
        raise Raised

    def spoil(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.a.register_forward_hook(spoil)
    with pytest.raises(Raised):
        step(model)  # the gradients of `b` have come, without a call
    handle.remove()
    assert "Raised" in model._gradwire_replica.reducer.group.failure.reason  # type: ignore[union-attr]
    step(model)
    assert_right(model)


def test_events_of_launches_do_not_depend_on_it(group: Group) -> None:
    module, launches = Branches(), []
    replica = replicate(module, group=group, buckets=Buckets((1,)))
    replica.reducer.may_poll = False
    for _ in range(4):
        step(module)
    with replica.reducer.events.listen(lambda e: launches.append(e) if isinstance(e, BucketLaunched) else None):
        step(module)
    assert [e.bucket for e in launches] == [0, 1, 2, 3]


def test_a_model_dropped_with_strays_is_freed_at_once(group: Group) -> None:
    module = Branches()
    replica = replicate(module, group=group)
    replica.reducer.may_poll = False
    for _ in range(3):
        step(module)
    with replica.no_sync():
        step(module, "b")
    assert replica.reducer.listener.arrived
    gc.collect()
    gc.disable()
    try:
        weak = weakref.ref(module.a.weight)
        del module, replica
        assert weak() is None
    finally:
        gc.enable()

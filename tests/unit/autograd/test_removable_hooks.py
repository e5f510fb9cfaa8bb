"""RemovableHooks: called for every gradient while they are on, and nothing left on a parameter when they are off."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.autograd.backward_end import at_backward_end
from gradwire.autograd.removable_hooks import RemovableHooks


class Listener:
    """Records which gradients it was called for, and their values then."""

    def __init__(self, count: int = 3) -> None:
        self.params = [nn.Parameter(torch.full((1,), 2.0 + i)) for i in range(count)]
        self.heard: list[tuple[int, float | None]] = []
        self.hooks = RemovableHooks(self.params, self.ready)
        self.hooks.register()

    def ready(self, index: int) -> None:
        grad = self.params[index].grad
        self.heard.append((index, None if grad is None else grad.item()))

    def product(self, *order: int, reentrant: bool = False) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        for i in order:
            p = self.params[i]
            x = checkpoint(lambda x, p=p: x * p, x, use_reentrant=True) if reentrant else x * p
        return x.sum()


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_every_gradient_is_told_of_when_it_is_there_in_its_order(listener: Listener) -> None:
    listener.product(0, 1, 2).backward()
    assert listener.heard == [(2, 6.0), (1, 8.0), (0, 12.0)]


def test_also_when_gradients_accumulate(listener: Listener) -> None:
    for _ in range(2):
        listener.heard.clear()
        listener.product(0, 1, 2).backward()
    assert listener.heard == [(2, 12.0), (1, 16.0), (0, 24.0)]


def test_also_with_create_graph(listener: Listener) -> None:
    for _ in range(2):
        listener.heard.clear()
        listener.product(2, 0).backward(create_graph=True)
    assert listener.heard == [(0, 8.0), (2, 4.0)]
    for p in listener.params:
        p.grad = None


def test_also_for_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)

    class Heard:
        def __init__(self) -> None:
            self.times = 0

        def ready(self, index: int) -> None:
            assert table.weight.grad is not None
            self.times += 1

    heard = Heard()
    hooks = RemovableHooks([table.weight], heard.ready)
    hooks.register()
    for times in (1, 2):
        table(torch.tensor([1])).sum().backward()
        assert heard.times == times


def test_every_graph_task_ends_with_all_told(listener: Listener) -> None:
    listener.product(0, 1, 2, reentrant=True).backward()
    assert listener.heard == [(2, 6.0), (1, 8.0), (0, 12.0)]
    listener.heard.clear()
    listener.product(1).backward()
    listener.product(0).backward()
    assert [i for i, _ in listener.heard] == [1, 0]


def test_a_gradient_that_comes_in_two_graph_tasks_is_told_of_twice(listener: Listener) -> None:
    listener.product(1, 0, 1, reentrant=True).backward()
    assert [i for i, _ in listener.heard] == [1, 0, 1]


def test_autograd_grad_is_not_told_of(listener: Listener) -> None:
    for p in listener.params[:2]:
        p.grad = torch.ones(1)
    torch.autograd.grad(listener.product(0, 1, 2), listener.params)
    assert listener.heard == []


def test_a_gradient_that_does_not_exist_is_not_told_of(listener: Listener) -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.set_materialize_grads(False)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    (Stop.apply(listener.params[0]) + listener.params[1]).sum().backward()  # type: ignore[no-untyped-call]
    assert [i for i, _ in listener.heard] == [1]


def test_a_gradient_that_somebody_took_away_at_once_is_told_of(listener: Listener) -> None:
    def step_and_clear(p: Tensor) -> None:
        p.grad = None

    listener.params[1].register_post_accumulate_grad_hook(step_and_clear)
    listener.product(0, 1, 2).backward()
    assert listener.heard == [(2, 6.0), (1, None), (0, 12.0)]


def test_put_on_during_backward_they_hear_of_what_is_still_to_come(listener: Listener) -> None:
    listener.hooks.remove()
    listener.params[1].register_post_accumulate_grad_hook(lambda _: listener.hooks.register())
    listener.product(0, 1, 2).backward()
    assert listener.heard == [(0, 12.0)]


def test_after_a_backward_that_failed_the_next_one_is_told_of_as_usual(listener: Listener) -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("here")

    x = torch.ones(1, requires_grad=True)
    y = x * listener.params[0]
    y.register_hook(fail)
    with pytest.raises(KeyError, match="here"):
        (y * listener.params[1]).sum().backward()
    assert listener.heard == []  # nothing may be launched anymore
    listener.product(0).backward()
    assert [i for i, _ in listener.heard] == [0]


def test_what_the_listener_raises_comes_out_of_backward(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(self: Listener, index: int) -> None:
        raise KeyError(index)

    monkeypatch.setattr(Listener, "ready", ready)
    for order in ((0, 1), (0,)):  # during backward, and at its end
        other = Listener()
        with pytest.raises(KeyError):
            other.product(*order).backward()


def test_a_frozen_parameter_can_be_hooked_later(listener: Listener) -> None:
    listener.hooks.remove()
    listener.params[0].requires_grad_(False)
    listener.hooks.register()
    listener.params[0].requires_grad_(True)
    listener.hooks.register()
    listener.product(0, 1).backward()
    assert [i for i, _ in listener.heard] == [1, 0]


def test_taken_off_they_leave_no_trace(listener: Listener) -> None:
    listener.hooks.remove()
    assert [p._backward_hooks for p in listener.params] == [None] * 3
    listener.product(0, 1, 2).backward()
    assert listener.heard == []
    listener.hooks.register()
    listener.product(0).backward()
    assert [i for i, _ in listener.heard] == [0]


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_others_stay(listener: Listener, first: bool) -> None:
    theirs: list[float] = []
    listener.hooks.remove()
    if not first:
        listener.hooks.register()
    handle = listener.params[0].register_hook(lambda grad: theirs.append(grad.item()))
    if first:
        listener.hooks.register()
    listener.hooks.remove()
    listener.product(0).backward()
    assert theirs == [1.0]
    assert listener.heard == []
    handle.remove()
    listener.product(0).backward()
    assert theirs == [1.0]


def test_they_keep_nothing_alive() -> None:
    listener = Listener()
    listener.product(0, 1).backward()
    gc.collect()
    gc.disable()
    try:
        weak = weakref.ref(listener.params[0]), weakref.ref(listener)
        param = listener.params[1]
        del listener
        assert [w() for w in weak] == [None, None]
        (param * 2).sum().backward()  # its hook's owner is gone
    finally:
        gc.enable()


class Ends:
    """What was called of it."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def ended(self) -> None:
        self.called.append("ended")

    def lost(self) -> None:
        self.called.append("lost")


def test_an_ending_may_queue_another(listener: Listener) -> None:
    ends = Ends()

    class Again(Ends):
        def ended(self) -> None:
            at_backward_end(ends.ended, failed=ends.lost)

    again = Again()
    listener.params[0].register_hook(lambda _: at_backward_end(again.ended, failed=again.lost))
    listener.product(0).backward()
    assert ends.called == ["ended"]


def test_the_ending_of_a_backward_that_failed_is_lost(listener: Listener) -> None:
    ends = Ends()

    def fail(_: Tensor) -> None:
        at_backward_end(ends.ended, failed=ends.lost)
        raise KeyError("here")

    listener.params[0].register_hook(fail)
    with pytest.raises(KeyError):
        listener.product(0).backward()
    assert ends.called == ["lost"]


def test_an_ending_whose_object_is_gone_is_nothing(listener: Listener) -> None:
    def queue(_: Tensor) -> None:
        ends = Ends()
        at_backward_end(ends.ended, failed=ends.lost)

    listener.params[0].register_hook(queue)
    listener.product(0).backward()
    assert [i for i, _ in listener.heard] == [0]

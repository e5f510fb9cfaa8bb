"""GradHooks: a gradient is reported once it has been accumulated, whatever it is; and what runs at the end of a backward."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradwire.autograd.backward_end import at_backward_end
from gradwire.autograd.grad_hooks import GradHooks


class Listener:
    """Records which gradients it was called for, and their values then."""

    def __init__(self, count: int = 3) -> None:
        self.params = [nn.Parameter(torch.full((1,), 2.0 + i)) for i in range(count)]
        self.calls: list[tuple[int, float | None]] = []
        self.hooks = GradHooks(self.params, self.arrived)

    def arrived(self) -> None:
        for index in self.hooks.pop():
            grad = self.params[index].grad
            self.calls.append((index, None if grad is None else grad.item()))

    def product(self, *order: int, reentrant: bool = False) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        for i in order:
            p = self.params[i]
            x = checkpoint(lambda x, p=p: x * p, x, use_reentrant=True) if reentrant else x * p
        return x.sum()


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_every_gradient_is_reported_when_it_has_been_accumulated(listener: Listener) -> None:
    listener.product(0, 1, 2).backward()
    assert listener.calls == [(2, 6.0), (1, 8.0), (0, 12.0)]


def test_also_when_gradients_accumulate(listener: Listener) -> None:
    for _ in range(2):
        listener.calls.clear()
        listener.product(0, 1, 2).backward()
    assert listener.calls == [(2, 12.0), (1, 16.0), (0, 24.0)]


def test_also_with_create_graph(listener: Listener) -> None:
    for _ in range(2):
        listener.calls.clear()
        listener.product(2, 0).backward(create_graph=True)
    assert listener.calls == [(0, 8.0), (2, 4.0)]
    for p in listener.params:
        p.grad = None


def test_also_for_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)

    class CallCounter:
        def __init__(self) -> None:
            self.times = 0

        def arrived(self) -> None:
            assert table.weight.grad is not None
            self.times += 1

    counter = CallCounter()
    hooks = GradHooks([table.weight], counter.arrived)
    for times in (1, 2):
        table(torch.tensor([1])).sum().backward()
        assert counter.times == times
    hooks.remove()


def test_every_graph_task_reports_its_own(listener: Listener) -> None:
    listener.product(0, 1, 2, reentrant=True).backward()
    assert listener.calls == [(2, 6.0), (1, 8.0), (0, 12.0)]
    listener.calls.clear()
    listener.product(1).backward()
    listener.product(0).backward()
    assert [i for i, _ in listener.calls] == [1, 0]


def test_a_gradient_of_two_graph_tasks_is_reported_twice(listener: Listener) -> None:
    listener.product(1, 0, 1, reentrant=True).backward()
    assert [i for i, _ in listener.calls] == [1, 0, 1]


def test_autograd_grad_is_not_reported(listener: Listener) -> None:
    for p in listener.params[:2]:
        p.grad = torch.ones(1)
    torch.autograd.grad(listener.product(0, 1, 2), listener.params)
    assert listener.calls == []


def test_an_undefined_gradient_is_reported(listener: Listener) -> None:
    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.set_materialize_grads(False)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    (Stop.apply(listener.params[0]) + listener.params[1]).sum().backward()  # type: ignore[no-untyped-call]
    assert sorted(listener.calls) == [(0, None), (1, 1.0)]


def test_a_gradient_that_a_hook_took_away_is_reported(listener: Listener) -> None:
    def step_and_clear(p: Tensor) -> None:
        p.grad = None

    listener.params[1].register_post_accumulate_grad_hook(step_and_clear)
    listener.product(0, 1, 2).backward()
    assert listener.calls == [(2, 6.0), (1, None), (0, 12.0)]


def test_after_a_backward_that_failed_the_next_one_is_reported_as_usual(listener: Listener) -> None:
    def fail(_: Tensor) -> None:
        raise KeyError("here")

    x = torch.ones(1, requires_grad=True)
    y = x * listener.params[0]
    y.register_hook(fail)
    with pytest.raises(KeyError, match="here"):
        (y * listener.params[1]).sum().backward()
    assert [i for i, _ in listener.calls] == [1]
    listener.product(0).backward()
    assert [i for i, _ in listener.calls] == [1, 0]


def test_what_the_listener_raises_comes_out_of_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    def arrived(self: Listener) -> None:
        raise KeyError("arrived")

    monkeypatch.setattr(Listener, "arrived", arrived)
    other = Listener()
    with pytest.raises(KeyError):
        other.product(0, 1).backward()


def test_a_frozen_parameter_can_be_hooked() -> None:
    listener = Listener()
    listener.hooks.remove()
    listener.params[1].requires_grad_(False)
    listener.hooks = GradHooks(listener.params, listener.arrived)
    assert not listener.params[1].requires_grad
    listener.params[1].requires_grad_()
    listener.product(0, 1).backward()
    assert [i for i, _ in listener.calls] == [1, 0]


def test_those_that_are_not_selected_are_reported_with_the_next_that_is(listener: Listener) -> None:
    listener.hooks.select([1])
    listener.product(0, 1, 2).backward()
    assert [i for i, _ in listener.calls] == [2, 1]
    assert listener.hooks.waiting() == {0}
    assert listener.hooks.pop() == [0]


def test_removed_they_report_nothing(listener: Listener) -> None:
    listener.hooks.remove()
    listener.product(0, 1, 2).backward()
    assert listener.calls == []


def test_hooks_of_others_run_first(listener: Listener) -> None:
    listener.params[0].register_post_accumulate_grad_hook(lambda p: p.grad.mul_(10) and None)  # type: ignore[union-attr]
    listener.product(0).backward()
    assert listener.calls == [(0, 10.0)]


@pytest.mark.parametrize("convert", [Tensor.double, Tensor.bfloat16])
def test_a_converted_parameter_is_found_and_can_be_hooked_again(listener: Listener, convert: Any) -> None:
    assert not listener.hooks.converted()
    listener.params[1].data = convert(listener.params[1].data)
    assert listener.hooks.converted()
    listener.product(1).backward()
    assert listener.calls == []  # autograd has given it another accumulator
    listener.hooks.attach()
    assert not listener.hooks.converted()
    listener.product(1).backward()
    assert [i for i, _ in listener.calls] == [1]


def test_a_model_that_was_converted_and_converted_back_is_found(listener: Listener) -> None:
    for convert in (Tensor.bfloat16, Tensor.float):
        for p in listener.params:
            p.data = convert(p.data)
    assert listener.hooks.converted()


def test_they_keep_nothing_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        listener = Listener()
        weak = weakref.ref(listener)
        parameter = listener.params[0]
        del listener
        assert weak() is None
        (parameter * 2).sum().backward()
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
    assert [i for i, _ in listener.calls] == [0]

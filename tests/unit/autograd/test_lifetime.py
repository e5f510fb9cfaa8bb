"""Nothing outlives its use: hooks, handles and states keep no tensor, node or module, and exit is clean."""

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.autograd import GradHooks, Kind, after_node, on_grad
from gradwire.autograd.user_hooks.attach import attach


class State:
    """Something a hook closes over, whose life can be watched."""

    def hook(self, *args: Any) -> None: ...


KINDS = ["on_grad", "before_node", "after_node", "after_accumulate"]


def target_of(kind: str, leaf: torch.Tensor, result: torch.Tensor) -> Any:
    return {"on_grad": leaf, "after_accumulate": leaf}.get(kind, result.grad_fn)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_gc")
def test_removal_frees_the_hook(api: Any, kind: str) -> None:
    w = torch.ones(2, requires_grad=True)
    y = w * 2
    state = State()
    alive = weakref.ref(state)
    handle = getattr(api, kind)(target_of(kind, w, y), state.hook)
    y.sum().backward(retain_graph=True)
    del state
    assert alive() is not None
    handle.remove()
    assert alive() is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_gc")
def test_a_handle_keeps_neither_tensor_nor_hook(api: Any, kind: str) -> None:
    w = torch.ones(2, requires_grad=True)
    y = w * 2
    state = State()
    alive = [weakref.ref(thing) for thing in (w, y, state)]
    handle = getattr(api, kind)(target_of(kind, w, y), state.hook)
    del w, y, state
    assert [ref() for ref in alive] == [None, None, None]
    handle.remove()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_gc")
def test_a_hook_that_closes_over_its_tensor_goes_with_its_removal(kind: str) -> None:
    w = torch.ones(2, requires_grad=True)
    y = w * 2
    alive = [weakref.ref(w), weakref.ref(y)]
    handle = getattr(sys.modules["gradwire.autograd"], kind)(target_of(kind, w, y), lambda *args, w=w, y=y: None)
    y.sum().backward()
    handle.remove()
    del w, y
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("kind", ["on_grad", "before_node", "after_node"])
def test_a_hook_that_closes_over_its_target_is_collected(api: Any, kind: str) -> None:
    """Not so for after_accumulate, in torch either: the collector cannot see those hooks. They are given their tensor."""
    w = torch.ones(2, requires_grad=True)
    y = w * 2
    target = target_of(kind, w, y)
    alive = [weakref.ref(w), weakref.ref(y)]
    getattr(api, kind)(target, lambda *args, held=target: None)
    y.sum().backward()
    del w, y, target
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("keep_handle", [True, False])
@pytest.mark.usefixtures("no_gc")
def test_a_module_with_attached_hooks_is_freed(kind: Kind, keep_handle: bool) -> None:
    model, state = nn.Linear(2, 2), State()
    alive = [weakref.ref(thing) for thing in (model, model.weight, model.bias, state)]
    handle = attach(model, "*", kind, state.hook)
    if not keep_handle:
        handle = None  # type: ignore[assignment]
    model(torch.ones(1, 2)).sum().backward()
    del model, state
    assert [ref() for ref in alive] == [None] * 4
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.usefixtures("no_gc")
def test_removal_frees_a_parameter_that_has_left_its_module(kind: Kind) -> None:
    model = nn.Linear(2, 2)
    alive = weakref.ref(model.weight)
    handle = attach(model, "weight", kind, lambda *args: None)
    handle.remove()
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert alive() is None


@pytest.mark.parametrize("kind", KINDS)
def test_removal_leaves_no_torch_hook(kind: str, accumulator: Any) -> None:
    """Registering and removing a thousand times leaves the tensor as it was."""
    w = torch.ones(2, requires_grad=True)
    node = accumulator(w)
    register = getattr(sys.modules["gradwire.autograd"], kind)
    target = w if kind in ("on_grad", "after_accumulate") else node
    for _ in range(1000):
        register(target, print).remove()
    probe = {
        "on_grad": w.register_hook,
        "after_accumulate": w.register_post_accumulate_grad_hook,
        "before_node": node.register_prehook,
        "after_node": node.register_hook,
    }[kind](print)
    assert list(probe.hooks_dict_ref().values()) == [print]


class CallCounter:
    number = 0

    def ready(self) -> None:
        self.number += 1


@pytest.mark.usefixtures("no_gc")
def test_steps_leave_nothing_behind() -> None:
    model = nn.Linear(2, 2)
    attach(model, "*", Kind.BEFORE_NODE, lambda grads: None)
    counter = CallCounter()
    hooks = GradHooks(list(model.parameters()), counter.ready)

    def steps(count: int) -> int:
        for _ in range(count):
            y = model(torch.ones(1, 2))
            on_grad(y, lambda grad: grad * 2)
            after_node(y.grad_fn, lambda inputs, outputs: None)
            with attach(model, "*", Kind.AFTER_NODE, lambda inputs, outputs: None):
                y.sum().backward()
        return len(gc.get_objects())

    steps(10)
    before = steps(10)
    assert steps(200) - before < 20
    assert counter.number == 220 * 2
    hooks.remove()


def test_nodes_of_custom_functions() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    w = torch.ones(2, requires_grad=True)
    y = Twice.apply(w)
    after_node(y.grad_fn, lambda inputs, outputs: tuple(grad * 5 for grad in inputs))
    after_node(y.grad_fn, lambda inputs, outputs: tuple(grad + 1 for grad in inputs))
    y.sum().backward()
    assert w.grad.tolist() == [11, 11]

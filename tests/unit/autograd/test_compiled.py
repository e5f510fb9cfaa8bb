"""All four kinds under torch.compile and compiled autograd: the results of eager, and the rules torch drops there."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

from gradwire.autograd import GradHooks, after_accumulate, after_node, before_node, on_grad
from gradwire.autograd.user_hooks.attach import attach
from gradwire.errors import AutogradHookError, AutogradHookTypeError


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_backward(*, backend: str = "eager", fullgraph: bool = False) -> Any:
    return compiled_autograd._enable(lambda graph: torch.compile(graph, backend=backend, fullgraph=fullgraph))


def halve(tensor: torch.Tensor) -> None:
    tensor.grad.mul_(0.5)


def train(forward: Callable[[nn.Module], Any], backward: Callable[[], Any], steps: int = 2) -> list[torch.Tensor]:
    """Every kind, twice, on parameters, on an output's node and on accumulators; the gradients after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    attach(model, "0.weight", "on_grad", lambda grad: grad * 2)
    attach(model, "*.weight", "on_grad", lambda grad: None)
    on_grad(model[0].weight, lambda grad: grad + 1)
    attach(model, "0.*", "after_accumulate", halve)
    after_accumulate(model[0].bias, halve)
    attach(model, "*.bias", "before_node", lambda grads: tuple(grad * 7 for grad in grads))
    attach(model, "*.bias", "before_node", lambda grads: grads)
    attach(model, "*.bias", "after_node", lambda inputs, outputs: None)
    run = forward(model)
    results = []
    for step in range(steps):
        model.zero_grad()
        y = run(torch.ones(5, 3) + step)
        on_grad(y, lambda grad: grad - 0.25)
        before_node(y.grad_fn, lambda grads: tuple(grad * 3 for grad in grads))
        before_node(y.grad_fn, lambda grads: tuple(grad + 3 for grad in grads))
        after_node(y.grad_fn, lambda inputs, outputs: tuple(g if g is None else g * 0.5 for g in inputs))
        after_node(y.grad_fn, lambda inputs, outputs: inputs)
        with backward():
            y.sum().backward()
        results += [param.grad.clone() for param in model.parameters()]
    return results


FORWARDS: dict[str, Callable[[nn.Module], Any]] = {
    "eager forward": lambda model: model,
    "compiled forward": lambda model: torch.compile(model, backend="aot_eager"),
}
BACKWARDS: dict[str, Callable[[], Any]] = {
    "eager backward": contextlib.nullcontext,
    "compiled backward": compiled_backward,
    "one graph": lambda: compiled_backward(fullgraph=True),
    "one graph through aot": lambda: compiled_backward(backend="aot_eager", fullgraph=True),
}


CASES = [
    ("compiled forward", "eager backward"),
    ("eager forward", "compiled backward"),
    ("compiled forward", "one graph"),
    ("eager forward", "one graph through aot"),
]


@pytest.mark.parametrize(("forward", "backward"), CASES)
def test_equal_to_eager(forward: str, backward: str) -> None:
    """Each way of either half; what they do to hooks does not depend on the other half."""
    expected = train(lambda model: model, contextlib.nullcontext)
    actual = train(FORWARDS[forward], BACKWARDS[backward])
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_hooks_registered_inside_a_compiled_region() -> None:
    """Also removed there, where torch's own handle fails."""

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w
        on_grad(y, lambda grad: grad * 2)
        on_grad(y, lambda grad: grad + 1)
        on_grad(y, lambda grad: grad * 100).remove()
        z = y * 3
        before_node(z.grad_fn, lambda grads: tuple(grad * 5 for grad in grads))
        return z.sum()

    grads = []
    for run in (loss, torch.compile(loss, backend="eager")):
        w = torch.full((3,), 2.0, requires_grad=True)
        run(torch.ones(3), w).backward()
        grads.append(w.grad.tolist())
    assert grads == [[31.0] * 3] * 2


def small(hook: Any) -> torch.Tensor:
    w = torch.ones(3, requires_grad=True)
    on_grad(w, hook)
    return (w * 2).sum()


def test_results_are_checked_where_torch_does_not() -> None:
    with compiled_backward():
        with pytest.raises(
            AutogradHookError, match=r"'smaller' has changed the size of value.*1 of 1 on tensor of shape"
        ):
            small(smaller).backward()
        with pytest.raises(AutogradHookTypeError, match="expected Variable, but hook returned 'int'"):
            small(lambda grad: 3).backward()


def smaller(grad: torch.Tensor) -> torch.Tensor:
    return grad[:1]


def test_an_exception_keeps_its_type_and_gets_its_note() -> None:
    def fails(grad: torch.Tensor) -> None:
        raise KeyError("own")

    with compiled_backward(), pytest.raises(KeyError, match="own") as caught:
        small(fails).backward()
    assert "on_grad hook" in caught.value.__notes__[0]


def test_where_graphs_must_not_break_the_message_still_names_the_hook() -> None:
    with compiled_backward(fullgraph=True), pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        small(smaller).backward()
    assert "failed: on_grad hook" in str(caught.value)
    assert "smaller on tensor of shape (3,)" in str(caught.value)


def test_a_pass_runs_its_snapshot() -> None:
    def calls(backward: Any) -> list[list[str]]:
        w = torch.ones(3, requires_grad=True)
        log: list[str] = []
        passes = []

        def first(grad: torch.Tensor) -> None:
            log.append("first")
            handles[0].remove()
            handles[1].remove()
            on_grad(w, lambda grad: log.append("added"))

        handles = [on_grad(w, first), on_grad(w, lambda grad: log.append("second"))]
        for _ in range(2):
            with backward():
                (w * 2).sum().backward()
            passes.append(list(log))
            log.clear()
        return passes

    assert calls(contextlib.nullcontext) == [["first", "second"], ["added"]]
    assert calls(compiled_backward) == [["first", "second"], ["added"]]


class Listener:
    def __init__(self, model: nn.Module) -> None:
        self.indices: list[int] = []
        self.hooks = GradHooks(list(model.parameters()), self.arrived)

    def arrived(self) -> None:
        self.indices += self.hooks.pop()


def test_gradient_hooks_with_a_compiled_model() -> None:
    model = nn.Linear(2, 2)
    listener = Listener(model)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        compiled(torch.ones(1, 2)).sum().backward()
    assert sorted(listener.indices) == [0, 0, 1, 1]

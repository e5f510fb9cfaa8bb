"""GradReady: each gradient once, the end once per outermost backward, interruptions noticed, nothing kept alive."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradwire.autograd import GradReady, after_accumulate
from gradwire.errors import UsageError


class Log:
    """An owner as the reducer is one: its methods are the callbacks, and it owns the GradReady."""

    def __init__(self, params: Any) -> None:
        self.events: list[Any] = []
        self.params = list(params)
        self.ready = GradReady(
            self.params, self.on_ready, on_backward_end=self.on_end, on_interrupted=self.on_interrupted
        )

    def on_ready(self, index: int) -> None:
        assert self.params[index].grad is not None
        self.events.append(index)

    def on_end(self) -> None:
        self.events.append("end")

    def on_interrupted(self) -> None:
        self.events.append("interrupted")

    def take(self) -> list[Any]:
        events, self.events = self.events, []
        return events


class Fail(torch.autograd.Function):
    """A node that raises on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("on the way")


def leaves(count: int) -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(count)]


def test_ready_then_end_every_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    log = Log(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        events = log.take()
        assert sorted(events[:-1]) == [0, 1, 2, 3]
        assert events[-1] == "end"
        assert not log.ready.running


def test_the_end_comes_before_backward_returns_and_after_all_gradients() -> None:
    a, b = leaves(2)
    seen: list[Any] = []
    ready = GradReady([a], lambda index: None, on_backward_end=lambda: seen.append(b.grad is not None))
    (Later.apply(b, None) + a).sum().backward()
    assert seen == [True]
    assert not ready.interrupted


class Later(torch.autograd.Function):
    """Passes on, and runs `also` on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, also: Any) -> torch.Tensor:
        ctx.also = also
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.also is not None:
            with torch.enable_grad():
                ctx.also()
        return grad, None


def test_nothing_ready_means_no_end() -> None:
    a, b = leaves(2)
    log = Log([a])
    (b * 2).sum().backward()
    torch.autograd.grad((a * 2).sum(), [a])
    (a * b).sum().backward(inputs=[b])
    with torch.no_grad():
        (a * 2).sum()
    assert log.take() == []


def test_unused_parameters_are_silent() -> None:
    a, b = leaves(2)
    log = Log([a, b])
    (b * 2).sum().backward()
    assert log.take() == [1, "end"]


def test_a_shared_parameter_is_ready_once() -> None:
    a, b = leaves(2)
    log = Log([a, b])
    (a * b * a + a).sum().backward()
    assert sorted(map(str, log.take())) == ["0", "1", "end"]


def test_two_backwards_of_one_forward() -> None:
    (a,) = leaves(1)
    log = Log([a])
    y = (a * 2).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert log.take() == [0, "end", 0, "end"]


def test_one_backward_of_two_losses() -> None:
    a, b = leaves(2)
    log = Log([a, b])
    torch.autograd.backward([(a * 2).sum(), (b * a).sum()])
    assert sorted(map(str, log.take())) == ["0", "1", "end"]


def test_create_graph() -> None:
    (a,) = leaves(1)
    log = Log([a])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        (a**3).sum().backward(create_graph=True)
    assert log.take() == [0, "end"]
    grad, a.grad = a.grad, None
    grad.sum().backward()
    assert log.take() == [0, "end"]


def test_functional_call_reaches_the_leaves_behind() -> None:
    model = nn.Linear(2, 2)
    log = Log(model.parameters())
    torch.func.functional_call(model, {"weight": model.weight * 2}, torch.ones(1, 2)).sum().backward()
    assert sorted(map(str, log.take())) == ["0", "1", "end"]
    others = {name: torch.ones_like(p, requires_grad=True) for name, p in model.named_parameters()}
    torch.func.functional_call(model, others, torch.ones(1, 2)).sum().backward()
    assert log.take() == []


def test_sparse_gradients() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    log = Log(table.parameters())
    table(torch.tensor([1])).sum().backward()
    assert log.take() == [0, "end"]


# ---------------------------------------------------------------- re-entrant backward


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("outside", [True, False], ids=["with parameters outside", "all parameters inside"])
def test_checkpoints_end_once(use_reentrant: bool, outside: bool) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    outer = nn.Linear(2, 2) if outside else nn.Identity()
    log = Log([*inner.parameters(), *outer.parameters()])
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        y = x
        for part in inner:
            y = checkpoint(part, y, use_reentrant=use_reentrant)
        outer(y).sum().backward()
        events = log.take()
        assert sorted(events[:-1]) == list(range(len(log.params)))
        assert events[-1] == "end"
        assert not log.ready.interrupted


def test_nested_checkpoints_end_once() -> None:
    model = nn.Linear(2, 2)
    log = Log(model.parameters())

    def level(depth: int, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: level(depth - 1, x), x, use_reentrant=True) if depth else model(x)

    level(4, torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert sorted(map(str, log.take())) == ["0", "1", "end"]


def test_a_parameter_in_two_reentrant_checkpoints_is_ready_twice() -> None:
    model = nn.Linear(2, 2, bias=False)
    log = Log(model.parameters())
    y = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        y = checkpoint(model, y, use_reentrant=True)
    y.sum().backward()
    assert log.take() == [0, 0, "end"]


@pytest.mark.parametrize("place", ["function", "on_grad", "after_accumulate", "after_node"])
def test_backward_inside_hooks_and_functions(place: str) -> None:
    a, b, c = leaves(3)
    log = Log([a, b])

    def inner() -> None:
        with torch.enable_grad():
            (a * 2).sum().backward()
        log.events.append("inner done")

    y = c * 1
    if place == "function":
        y = Later.apply(y, inner)
    elif place == "on_grad":
        y.register_hook(lambda grad: inner())
    elif place == "after_accumulate":
        c.register_post_accumulate_grad_hook(lambda tensor: inner())
    else:
        y.grad_fn.register_hook(lambda inputs, outputs: inner())
    # In the last place a parameter of the outer backward is needed: see Note [When a backward ends].
    (y + b if place == "after_node" else y).sum().backward()
    expected = ["1"] if place == "after_node" else []
    events = log.take()
    assert sorted(map(str, events)) == sorted(["0", "end", "inner done", *expected])
    assert events[-1] == "end"


def test_what_an_after_node_hook_hides_shows_as_an_interruption() -> None:
    a, c = leaves(2)
    log = Log([a])
    y = c * 1

    def hidden(inputs: Any, outputs: Any) -> None:
        with torch.enable_grad():
            (a * 2).sum().backward()

    y.grad_fn.register_hook(hidden)
    y.sum().backward()
    assert log.take() == [0]
    del y
    assert log.ready.interrupted
    (a * 2).sum().backward()
    assert log.take() == ["interrupted", 0, "end"]


def test_a_backward_started_at_the_end_of_another_is_one_of_its_own() -> None:
    (a,) = leaves(1)
    events: list[Any] = []

    def end() -> None:
        events.append("end")
        if len(events) < 4:
            with torch.enable_grad():
                (a * 2).sum().backward()

    ready = GradReady([a], events.append, on_backward_end=end)
    (a * 2).sum().backward()
    assert events == [0, "end", 0, "end"]
    assert not ready.running


# ---------------------------------------------------------------- failure


def failing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Its backward makes `a` ready, then raises."""
    return (Fail.apply(b * 1) * a).sum()


def test_an_interrupted_backward_is_known_at_once_and_told_before_the_next() -> None:
    a, b = leaves(2)
    log = Log([a, b])
    with pytest.raises(ValueError, match="on the way"):
        failing(a, b).backward()
    assert log.take() == [0]
    assert log.ready.interrupted
    assert not log.ready.running
    (a * b).sum().backward()
    assert log.take()[0] == "interrupted"
    assert not log.ready.interrupted
    (a * 2).sum().backward()
    assert log.take() == [0, "end"]


def test_an_interrupted_backward_with_its_graph_and_error_kept() -> None:
    """Neither a retained graph nor a kept traceback hides it."""
    a, b = leaves(2)
    log = Log([a, b])
    loss = failing(a, b)
    with pytest.raises(ValueError, match="on the way") as kept:
        loss.backward(retain_graph=True)
    assert kept.value is not None
    assert log.ready.interrupted
    with pytest.raises(ValueError, match="on the way"):
        loss.backward(retain_graph=True)
    assert log.take() == [0, "interrupted", 0]


def test_failure_after_an_inner_backward_has_ended() -> None:
    a, b = leaves(2)
    log = Log([a])

    def inner() -> None:
        (a * 2).sum().backward()

    loss = Later.apply(Fail.apply(b * 1), inner).sum()
    with pytest.raises(ValueError, match="on the way"):
        loss.backward()
    assert log.take() == [0]
    assert log.ready.interrupted
    loss = Later.apply(b * 1, inner).sum()
    loss.backward()
    assert log.take() == ["interrupted", 0, "end"]


def test_failure_inside_an_inner_backward() -> None:
    a, b, c = leaves(3)
    log = Log([a])
    loss = Later.apply(c * 1, lambda: failing(a, b).backward()).sum()
    with pytest.raises(ValueError, match="on the way"):
        loss.backward()
    assert log.take() == [0]
    assert log.ready.interrupted


@pytest.mark.parametrize("which", ["on_ready", "on_backward_end"])
def test_what_a_callback_raises_comes_out_of_backward(which: str) -> None:
    (a,) = leaves(1)
    events: list[Any] = []
    broken = {which}

    def step(name: str) -> None:
        events.append(name)
        if name in broken:
            raise OSError(name)

    ready = GradReady([a], lambda index: step("on_ready"), on_backward_end=lambda: step("on_backward_end"))
    with pytest.raises(OSError, match=which):
        (a * 2).sum().backward()
    # The end was reached, and what it did with that is its own affair.
    assert ready.interrupted == (which == "on_ready")
    assert not ready.running
    broken.clear()
    events.clear()
    (a * 2).sum().backward()
    assert events == ["on_ready", "on_backward_end"]


# ---------------------------------------------------------------- registration and life


@pytest.mark.usefixtures("no_gc")
def test_the_model_and_the_owner_are_freed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    log = Log(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    alive = [weakref.ref(thing) for thing in (model, log, log.ready, model[0].weight)]
    del model, log
    assert [ref() for ref in alive] == [None] * 4


@pytest.mark.usefixtures("no_gc")
def test_they_are_freed_after_an_interruption_too() -> None:
    a, b = leaves(2)
    log = Log([a, b])
    try:
        failing(a, b).backward()
    except ValueError:
        pass
    alive = [weakref.ref(thing) for thing in (log, a)]
    del log, a, b
    assert [ref() for ref in alive] == [None] * 2


def test_dropping_it_removes_the_hooks() -> None:
    (a,) = leaves(1)
    log = Log([a])
    assert len(a._post_accumulate_grad_hooks) == 1
    del log
    assert len(a._post_accumulate_grad_hooks) == 0


def test_close_is_idempotent_and_works_during_a_backward() -> None:
    a, b = leaves(2)
    events: list[Any] = []

    def on_ready(index: int) -> None:
        events.append(index)
        ready.close()

    ready = GradReady([a, b], on_ready, on_backward_end=lambda: events.append("end"))
    (a * b).sum().backward()
    ready.close()
    (a * b).sum().backward()
    assert len(events) == 1
    assert not ready.interrupted


def test_run_last_puts_later_hooks_first() -> None:
    def scale(tensor: torch.Tensor) -> None:
        tensor.grad.mul_(10)

    a, b = leaves(2)
    seen: list[Any] = []
    ready = GradReady([a, b], lambda index: seen.append((a, b)[index].grad.tolist()), on_backward_end=lambda: None)
    after_accumulate(a, scale)
    ready.run_last()
    ready.run_last()
    a.sum().backward()
    b.sum().backward()
    assert seen == [[10, 10], [1, 1]]
    ready.close()
    ready.run_last()


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (lambda: [torch.ones(2)], r"params\[0\] of shape \(2,\) never gets"),
        (lambda: [torch.ones(2, requires_grad=True) * 2], r"params\[0\]"),
        (lambda: leaves(1) * 2, r"params\[1\] is the same tensor as params\[0\]"),
    ],
    ids=["frozen", "not a leaf", "twice"],
)
def test_params_that_cannot_be_watched(params: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        GradReady(params(), print, on_backward_end=print)


def test_two_watch_the_same_parameters() -> None:
    (a,) = leaves(1)
    logs = [Log([a]), Log([a])]
    (a * 2).sum().backward()
    assert [log.take() for log in logs] == [[0, "end"], [0, "end"]]

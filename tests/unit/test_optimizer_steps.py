"""Hooks on the steps of every optimizer of the process, of which threads may add and remove some at any time."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwire.autograd.optimizer_steps import after_optimizer_steps, before_optimizer_steps


def optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=1.0)


def test_hooks_are_called_in_order_with_the_optimizer_and_the_arguments() -> None:
    one, calls = optimizer(), []

    with (
        before_optimizer_steps(lambda *args: calls.append(("before", *args))),
        before_optimizer_steps(lambda *args: calls.append(("second", *args))),
        after_optimizer_steps(lambda *args: calls.append(("after", *args))),
    ):
        one.step(closure=None)
    expected = [(name, one, (one,), {"closure": None}) for name in ("before", "second", "after")]
    assert calls == expected
    one.step()
    assert calls == expected


def test_hooks_may_replace_the_arguments_one_after_the_other() -> None:
    one, calls = optimizer(), []

    def wrap(name: str) -> Any:
        def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
            inner = kwargs["closure"]
            return args, {"closure": lambda: (calls.append(name), inner())[1]}

        return before

    with before_optimizer_steps(wrap("inner")), before_optimizer_steps(wrap("outer")):
        assert one.step(closure=lambda: calls.append("closure") or 3.0) == 3.0
    assert calls == ["outer", "inner", "closure"]


def test_a_hook_may_remove_itself_and_others() -> None:
    one, calls = optimizer(), []
    handles = []

    def once(*_: Any) -> None:
        calls.append(1)
        for handle in handles:
            handle.remove()

    handles += [before_optimizer_steps(once), before_optimizer_steps(lambda *_: calls.append(2))]
    one.step()
    one.step()
    assert calls == [1, 2]


def test_what_a_hook_raises_ends_the_step() -> None:
    one = optimizer()

    def refuses(*_: Any) -> None:
        raise ValueError("not now")

    with before_optimizer_steps(refuses), pytest.raises(ValueError, match="not now"):
        one.step()
    assert one.param_groups[0]["params"][0].item() == 0
    one.step()


@pytest.fixture
def _threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_switch_often")
def test_threads_add_and_remove_hooks_while_others_step() -> None:
    """As ranks do that are threads. With torch's global hooks, a step raises that the dictionary has changed."""
    errors: list[BaseException] = []
    done = threading.Event()

    def steps() -> None:
        one = optimizer()
        try:
            for _ in range(2000):
                one.step()
        except RuntimeError as error:
            errors.append(error)
        done.set()

    with before_optimizer_steps(lambda *_: None), after_optimizer_steps(lambda *_: None):
        stepping = threading.Thread(target=steps)
        stepping.start()
        while not done.is_set():
            with before_optimizer_steps(lambda *_: None), after_optimizer_steps(lambda *_: None):
                pass
        stepping.join(60)
    assert errors == []

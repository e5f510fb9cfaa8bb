"""Code of the test that runs in the middle of a backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object] | None) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        if ctx.call is not None:
            ctx.call()
        return grad, None


def in_backward(x: Tensor, call: Callable[[], object] | None) -> Tensor:
    """A copy of `x` whose backward calls a function, if there is one, before it passes the gradient on."""
    copied: Tensor = _Identity.apply(x, call)  # type: ignore[no-untyped-call]
    return copied


def fail_in_backward(x: Tensor, kind: type[BaseException] | None, text: str) -> Tensor:
    """A copy of `x` whose backward raises a new error of that kind, if there is one: the graph must not keep its traceback."""

    def fail() -> None:
        assert kind is not None
        raise kind(text)

    return in_backward(x, None if kind is None else fail)

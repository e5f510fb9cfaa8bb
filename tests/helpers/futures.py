"""Futures as hooks and works of torch return them."""

from typing import Any

from torch.futures import Future


def done(value: Any) -> Future[Any]:
    """A future that has its value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future

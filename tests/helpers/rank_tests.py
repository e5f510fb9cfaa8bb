"""Tests that run as a whole on every rank."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from gradwire.testing import run_ranks


def on_ranks(size: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on `size` ranks. Its first parameter is the rank's group; pytest gives the others."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        _, *others = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            run_ranks(lambda group: test(group, **arguments), size, **options)

        run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return run

    return decorate

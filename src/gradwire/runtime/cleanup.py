"""What is undone if the code after it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

P = ParamSpec("P")


@contextmanager
def on_failure(undo: Callable[P, object], *args: P.args, **named: P.kwargs) -> Iterator[None]:
    """Call `undo` if the block raises, whatever it raises.

    >>> import contextlib
    >>> with contextlib.suppress(ValueError), on_failure(print, "undone"):
    ...     raise ValueError
    undone
    """
    try:
        yield
    except BaseException:
        undo(*args, **named)
        raise

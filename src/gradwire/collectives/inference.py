"""Writing to tensors that were made in `torch.inference_mode()`.

torch refuses in-place operations on such a tensor outside that mode, and the mode belongs to a thread: a group that writes the
result of an operation in another thread than the caller's would fail. So outputs are written in their own mode.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def writing(outputs: Iterable[Tensor]) -> AbstractContextManager[object]:
    """The context in which all of `outputs` can be written.

    >>> with torch.inference_mode():
    ...     t = torch.zeros(2)
    >>> with writing([t]):
    ...     t.add_(1)
    tensor([1., 1.])
    """
    return torch.inference_mode() if any(t.is_inference() for t in outputs) else nullcontext()


def writes(outputs: Iterable[Tensor], program: Generator[T, None, None]) -> Generator[T, None, None]:
    """`program`, which writes to `outputs` between its steps; the steps themselves run in the mode of the caller."""
    return _in_inference_mode(program) if any(t.is_inference() for t in outputs) else program


def _in_inference_mode(program: Generator[T, None, None]) -> Generator[T, None, None]:
    try:
        while True:
            with torch.inference_mode():
                try:
                    step = next(program)
                except StopIteration:
                    return
            yield step
    finally:
        program.close()

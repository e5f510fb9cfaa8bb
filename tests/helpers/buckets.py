"""Buckets and gradients for tests of hooks, and hooks run over several steps."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gradwire.hooks import BucketSpec, CommHook
from gradwire.testing import simulate


def bucket(
    *shapes: tuple[int, ...], names: Any = None, dtype: torch.dtype = torch.float32, index: int = 0
) -> BucketSpec:
    """Contiguous parameters p0, p1, ... of these shapes."""
    strides = tuple(tuple(torch.empty(shape, device="meta").stride()) for shape in shapes)
    names = tuple(names or (f"p{i}" for i in range(len(shapes))))
    return BucketSpec(index, names, shapes, strides, dtype, torch.device("cpu"))


class TorchBucket:
    """The part of torch's GradBucket that `as_torch_hook` uses."""

    def __init__(self, parameters: list[Tensor], value: float = 2.0, *, index: int = 0) -> None:
        self._parameters, self._index = parameters, index
        self._flat = torch.full((sum(p.numel() for p in parameters),), float(value))

    def index(self) -> int:
        return self._index

    def buffer(self) -> Tensor:
        return self._flat

    def parameters(self) -> list[Tensor]:
        return self._parameters


def gradients(ranks: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Normal numbers for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(ranks)]


def steps(hook: CommHook, brought: Callable[[int], list[Tensor]], count: int, **named: Any) -> Iterator[Any]:
    """The simulation of each step, which starts with the states of the last one."""
    states: Any = None
    for step in range(count):
        done = simulate(hook, brought(step), states=states, step=step, **named)
        states = done.states
        yield done

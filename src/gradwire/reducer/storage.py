"""Bucket memory: one flat buffer per bucket, from the group, with a view for each gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import eq, is_not
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UnexpectedLayout
from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec

# Copies record no graph whatever the gradients carry, and cost a fifth less than under no_grad, which asks autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd
_address: Callable[[Any], int] = Tensor.data_ptr


class Storage:
    """The buffer of one bucket. A sparse bucket has none: its gradient travels as it is."""

    __slots__ = ("_addresses", "buffer", "spec", "views")

    def __init__(self, spec: BucketSpec, group: Group | None) -> None:
        self.spec = spec
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        self._addresses: list[int] = []
        if group is not None:
            self.allocate(group)

    def allocate(self, group: Group) -> None:
        """Take the memory, unless it is there or none is needed."""
        spec = self.spec
        if self.buffer is None and not spec.sparse:
            self.buffer = group.allocate(spec.numel, dtype=spec.dtype, device=spec.device).zero_()
            self.views = spec.views(self.buffer)
            self._addresses = [view.data_ptr() for view in self.views]

    def release(self) -> None:
        """Give the memory back; gradients that are views of it keep it until they go."""
        self.buffer, self.views, self._addresses = None, [], []

    def copy_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Copy gradients into the buffer, all of which are known to be there and to lie elsewhere."""
        with below_autograd():
            torch._foreach_copy_(self.views, gradients)  # type: ignore[arg-type]

    def take_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Bring the gradients into the buffer: those that lie elsewhere are copied, absent ones are zero."""
        if all(map(is_not, gradients, repeat(None))) and not any(map(eq, map(_address, gradients), self._addresses)):
            self.copy_in(gradients)
            return
        places, values = [], []
        with below_autograd():
            for view, address, grad in zip(self.views, self._addresses, gradients, strict=True):
                if grad is view:
                    continue
                if grad is None:
                    view.zero_()
                elif grad.data_ptr() != address:
                    places.append(view)
                    values.append(grad)
                elif grad.stride() != view.stride():
                    places.append(view)
                    values.append(grad.clone())  # it lies where it is to be written, in another order
            if places:
                torch._foreach_copy_(places, values)

    def explain(self, gradients: Sequence[Tensor | None], error: RuntimeError) -> None:
        """If gradients could not be copied because one is sparse, raise an error that names its parameter."""
        for name, grad in zip(self.spec.names, gradients, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise UnexpectedLayout(
                    f"filling {self.spec}: the gradient of {name} has layout {grad.layout}, and its bucket is dense. Only the "
                    "weights of nn.Embedding and nn.EmbeddingBag with sparse=True get sparse buckets: use one of these modules, or "
                    "sparse=False in torch.nn.functional.embedding."
                ) from error

    def put(self, result: Tensor) -> None:
        """Make the reduced bucket the buffer's contents."""
        buffer = self.buffer
        assert buffer is not None
        if result.data_ptr() != buffer.data_ptr() or result.dtype != buffer.dtype:
            buffer.copy_(result.detach().reshape(-1))

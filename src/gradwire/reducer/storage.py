"""Bucket memory: one flat buffer per bucket, from the group, with a view for each gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec


class Storage:
    """The buffer of one bucket. A sparse bucket has none: its gradient travels as it is."""

    __slots__ = ("buffer", "spec", "views")

    def __init__(self, spec: BucketSpec, group: Group) -> None:
        self.spec = spec
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        if not spec.sparse:
            self.buffer = group.allocate(spec.numel, dtype=spec.dtype, device=spec.device).zero_()
            self.views = spec.views(self.buffer)

    def take_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Bring the gradients into the buffer: those that lie elsewhere are copied, absent ones are zero."""
        places, values = [], []
        for view, grad in zip(self.views, gradients, strict=True):
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            elif grad.data_ptr() != view.data_ptr() or grad.stride() != view.stride() or grad.numel() == 0:
                places.append(view)
                values.append(grad.detach())
        if places:
            torch._foreach_copy_(places, values)

    def put(self, result: Tensor) -> None:
        """Make the reduced bucket the buffer's contents."""
        buffer = self.buffer
        assert buffer is not None
        if result.data_ptr() != buffer.data_ptr() or result.dtype != buffer.dtype:
            buffer.copy_(result.detach().view(-1))

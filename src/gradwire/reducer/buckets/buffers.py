"""BucketBuffers: the memory of all buckets of a model; gradients go in when a bucket is launched, averages come back out.

Note [One copy]
Averages of all buckets of a device are copied out by one call: a bucket of 25 MB alone does not occupy all of a large GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import repeat
from operator import is_not
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageRuntimeError
from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.reducer.buckets.layout import BucketLayout

# Copies record no graph whatever the gradients carry, and cost a fifth less than under no_grad, which asks autograd.
below_autograd = torch._C._AutoDispatchBelowAutograd
_address: Callable[[Any], int] = Tensor.data_ptr


class ZeroBucket(GradBucket):
    """What a rank without inputs contributes: zeros, whatever the `.grad` of its parameters still holds."""

    __slots__ = ()


class BucketBuffers:
    """The buckets of one model in one layout. With `keep_views`, gradients are views of the buckets after a step. With `lazy`,
    memory is allocated when a bucket is launched and released at the end of the step."""

    def __init__(self, parameters: Sequence[Tensor], layout: BucketLayout, *, keep_views: bool, lazy: bool) -> None:
        self.layout = layout
        self.keep_views = keep_views
        self.lazy = lazy
        self.storages: list[Storage] = []
        self.parameters: list[list[Tensor]] = []
        """Of each bucket, its parameters."""
        self._all_parameters = list(parameters)

    def allocate(self, layout: BucketLayout, group: Group) -> None:
        self.layout = layout
        self.storages = [Storage(spec, None if self.lazy else group) for spec in layout.buckets]
        self.parameters = [[self._all_parameters[i] for i in members] for members in layout.members]

    def fill(
        self, bucket: int, gradients: Sequence[Tensor | None], group: Group, *, last: bool, unused: Collection[int]
    ) -> GradBucket:
        """Bring gradients into a bucket. Returns what a hook sees of it; of a sparse one, the gradient itself is the buffer. With
        `keep_views` each `.grad` becomes the view now, so that the gradient's own memory is free while backward goes on. Those of
        `unused` parameters stay as they are."""
        storage, parameters = self.storages[bucket], self.parameters[bucket]
        if self.lazy:
            storage.allocate(group)
        if storage.buffer is None:
            return GradBucket(storage.spec, _sparse(gradients[0], parameters[0]), parameters, is_last=last)
        try:
            storage.copy_in(gradients)
        except RuntimeError as error:
            storage.explain(gradients, error)
            raise
        if self.keep_views:
            members = zip(self.layout.members[bucket], parameters, gradients, storage.views, strict=True)
            for i, parameter, grad, view in members:
                # Compiled code has reported some before they are accumulated: they are not in `.grad` yet.
                if grad is not None and grad is not view and parameter.grad is grad and i not in unused:
                    parameter.grad = view
        return GradBucket(storage.spec, storage.buffer, parameters, is_last=last, views=storage.views)

    def zeros(self) -> list[ZeroBucket]:
        """All buckets with nothing in them, in launch order, in memory of their own."""
        buckets: list[ZeroBucket] = []
        for storage, parameters in zip(self.storages, self.parameters, strict=True):
            spec = storage.spec
            shape = parameters[0].shape if spec.sparse else (spec.numel,)
            buffer = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
            if spec.sparse:
                buffer = buffer.to_sparse(1)
            buckets.append(ZeroBucket(spec, buffer, parameters, is_last=storage is self.storages[-1]))
        return buckets

    def put_back(self, results: Iterable[tuple[int, Tensor]], unused: Collection[int] = ()) -> None:
        """Make the averages of buckets the parameters' gradients. Those of `unused` parameters stay. See Note [One copy]."""
        copies: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for bucket, result in results:
            storage, indices = self.storages[bucket], self.layout.members[bucket]
            parameters, views = self.parameters[bucket], storage.views
            if storage.buffer is None:
                if indices[0] not in unused:
                    parameters[0].grad = result
                continue
            storage.put(result)
            if unused:
                used = [k for k, i in enumerate(indices) if i not in unused]
                parameters, views = [parameters[k] for k in used], [views[k] for k in used]
            if self.keep_views:
                for parameter, view in zip(parameters, views, strict=True):
                    if parameter.grad is not view:
                        parameter.grad = view
            else:
                alike = copies.setdefault((storage.spec.device, storage.spec.dtype), ([], []))
                alike[0].extend(parameters)
                alike[1].extend(views)
        for parameters, values in copies.values():
            _copy_out(parameters, values)

    def release(self, bucket: int) -> None:
        if self.lazy:
            self.storages[bucket].release()


def _copy_out(parameters: list[Tensor], values: list[Tensor]) -> None:
    """Copy averages, all of one device and type, into the gradients; one that is absent becomes a tensor of its own."""
    gradients: list[Any] = [p.grad for p in parameters]
    if not all_there(gradients):
        for k in [k for k, grad in enumerate(gradients) if grad is None]:
            parameters[k].grad = gradients[k] = torch.empty_like(values[k])
    if not gradients:
        return
    with below_autograd():
        try:
            torch._foreach_copy_(gradients, values)
        except RuntimeError:
            # Some are sparse or lazily conjugate: to look for them first would cost as much as to copy small ones.
            for parameter, grad, value in zip(parameters, gradients, values, strict=True):
                if grad.is_sparse:
                    parameter.grad = value.clone()
                else:
                    grad.copy_(value)


def _sparse(grad: Tensor | None, parameter: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device).to_sparse(1)
    return grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)


class Storage:
    """The buffer of one bucket. A sparse bucket has none: its gradient travels as it is."""

    __slots__ = ("buffer", "spec", "views")

    def __init__(self, spec: BucketSpec, group: Group | None) -> None:
        self.spec = spec
        self.buffer: Tensor | None = None
        self.views: list[Tensor] = []
        if group is not None:
            self.allocate(group)

    def allocate(self, group: Group) -> None:
        spec = self.spec
        if self.buffer is None and not spec.sparse:
            self.buffer = group.allocate(spec.numel, dtype=spec.dtype, device=spec.device).zero_()
            self.views = spec.views(self.buffer)

    def release(self) -> None:
        self.buffer, self.views = None, []

    def copy_in(self, gradients: Sequence[Tensor | None]) -> None:
        """Bring the gradients into the buffer: those that lie elsewhere are copied, absent ones are zero."""
        assert self.buffer is not None
        start = self.buffer.data_ptr()
        end = start + self.buffer.nbytes
        with below_autograd():
            if all_there(gradients):
                addresses = list(map(_address, gradients))
                if max(addresses) < start or min(addresses) >= end or not any(start <= a < end for a in addresses):
                    torch._foreach_copy_(self.views, gradients)  # type: ignore[arg-type]
                    return
            places, values = [], []
            for view, grad in zip(self.views, gradients, strict=True):
                if grad is None or grad is view:
                    continue
                address = grad.data_ptr()
                if address != view.data_ptr() or grad.stride() != view.stride():
                    places.append(view)
                    # One that lies in the buffer, in the place of another or in another order, must not be overwritten.
                    values.append(grad.clone() if start <= address < end else grad)
            for view, grad in zip(self.views, gradients, strict=True):
                if grad is None:
                    view.zero_()
            if places:
                torch._foreach_copy_(places, values)

    def explain(self, gradients: Sequence[Tensor | None], error: RuntimeError) -> None:
        """If gradients could not be copied because one is sparse, raise an error that names its parameter."""
        for name, grad in zip(self.spec.names, gradients, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise UsageRuntimeError(
                    f"filling {self.spec}: the gradient of {name} has layout {grad.layout}, and its bucket is dense. Only the "
                    "weights of nn.Embedding and nn.EmbeddingBag with sparse=True get sparse buckets: use one of these modules, or "
                    "sparse=False in torch.nn.functional.embedding."
                ) from error

    def put(self, result: Tensor) -> None:
        buffer = self.buffer
        assert buffer is not None
        if result.data_ptr() != buffer.data_ptr() or result.dtype != buffer.dtype:
            buffer.copy_(result.detach().reshape(-1))


def all_there(gradients: Sequence[Tensor | None]) -> bool:
    """Whether none is None. (`in` would compare tensors.)"""
    return all(map(is_not, gradients, repeat(None)))

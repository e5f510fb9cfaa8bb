"""Finds NaN and infinity in the gradients and averages of buckets: on a GPU without waiting for it until somebody asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.collectives.finite import first_nonfinite, first_nonfinite_later, probe
from gradwire.hooks.bucket import BucketSpec, GradBucket, is_dense

Part = TypeVar("Part", bound=tuple[Any, ...])
Named = tuple[str, Tensor]
"""A parameter's name, and its gradient or its part of an average."""


class Kind(IntEnum):
    """What an element is. The value is sent to other ranks."""

    NAN = 1
    INFINITE = 2
    BEYOND = 3
    """Finite, but not in the dtype in which it is reduced."""


class Found(NamedTuple):
    """An element that is not finite."""

    kind: Kind
    parameter: int
    """The parameter's number in the model."""
    element: int
    """In the order of the parameter's shape."""


@dataclass(frozen=True, slots=True)
class Look:
    """A tensor that was looked at. If `probe` is not finite, `find` returns what is not finite in it, if anything."""

    probe: Tensor
    find: Callable[[], list[Found]]


class Search:
    """Looks at the buckets of a model with these parameters."""

    def __init__(self, names: Sequence[str]) -> None:
        self._number = {name: number for number, name in enumerate(names)}

    def before(self, bucket: GradBucket, narrow: torch.dtype | None) -> Look | None:
        """Look at gradients that will be overwritten, as they are now; None if they are known to be finite. `narrow`: see
        `probe`."""
        spec, buffer = bucket.spec, bucket.buffer().detach()
        test = probe(buffer, narrow=narrow)
        if not on_host(buffer) and buffer.is_sparse:
            copied = buffer.clone()
            return Look(test, lambda: self._search([(spec.names[0], copied)], narrow))
        if not on_host(buffer) and buffer.numel():
            places = [(one, first_nonfinite_later(buffer, narrow=one)) for one in dict.fromkeys((None, narrow))]
            firsts = [(one, place, buffer.index_select(0, place.view(1))) for one, place in places]
            return Look(test, lambda: self._on_device(spec, firsts))
        if math.isfinite(test.item()):
            return None
        found = self._search(list(zip(spec.names, bucket.gradients(), strict=True)), narrow)
        return Look(test, lambda: found)

    def after(self, spec: BucketSpec, result: Tensor) -> Look | None:
        """Look at an average, which stays as it is; None if it is known to be finite."""
        result = result.detach()
        test = probe(result)
        if on_host(result) and math.isfinite(test.item()):
            return None

        def find() -> list[Found]:
            parts = [result] if result.is_sparse else spec.views(result.reshape(-1))
            return self._search(list(zip(spec.names, parts, strict=True)), None)

        return Look(test, find)

    def in_grads(self, bucket: GradBucket, narrow: torch.dtype | None) -> list[Found]:
        """What is not finite in the `.grad` of a bucket's parameters."""
        parameters = zip(bucket.names(), bucket.parameters(), strict=True)
        return self._search([(name, p.grad) for name, p in parameters if p.grad is not None], narrow)

    def _search(self, parts: list[Named], narrow: torch.dtype | None) -> list[Found]:
        """What is not finite in `parts`, in the order of backward; else what would not be in the dtype `narrow`."""
        parts = [(name, part.detach()) for name, part in in_order_of_backward(parts, self._number)]
        for one in dict.fromkeys((None, narrow)):
            found = [
                Found(_kind(part, element), self._number[name], element)
                for name, part in parts
                if (element := first_nonfinite(part, narrow=one)) is not None
            ]
            if found:
                return found
        return []

    def _on_device(self, spec: BucketSpec, firsts: list[tuple[torch.dtype | None, Tensor, Tensor]]) -> list[Found]:
        """The first element of a bucket that was not finite before its reduction; else the first beyond a dtype's range."""
        for narrow, where, value in firsts:
            if first_nonfinite(value, narrow=narrow) is not None:
                place = int(where)
                member = max(i for i, at in enumerate(spec.offsets) if at <= place and spec.numels[i])
                element = number_in_shape(place - spec.offsets[member], spec.shapes[member], spec.strides[member])
                return [Found(_kind(value, 0), self._number[spec.names[member]], element)]
        return []


def examine(looks: Sequence[Look], device: torch.device) -> list[list[Found]]:
    """What is not finite, by look. Waits for the device, once if all is finite."""
    if not looks:
        return []
    probes = torch.stack([look.probe.to(device, torch.float32) for look in looks]).tolist()
    return [[] if math.isfinite(value) else look.find() for look, value in zip(looks, probes, strict=True)]


def in_order_of_backward(parts: Sequence[Part], number: Mapping[str, int]) -> Iterable[Part]:
    """Parts of a bucket, each of which begins with its parameter's name, in the order in which gradients arrive.

    That is how they lie in a bucket, except in the first step, where they are in the model's order: there the last ones come first.
    """
    numbers = [number[part[0]] for part in parts]
    return reversed(parts) if numbers == sorted(numbers) else parts


def on_host(t: Tensor) -> bool:
    """Whether a value can be read without waiting for a device."""
    return t.device.type == "cpu"


def _kind(part: Tensor, element: int) -> Kind:
    if part.is_sparse:
        values = part._values()  # of which one is known to be bad, and the worst is told
        return Kind.NAN if bool(values.isnan().any()) else Kind.INFINITE if bool(values.isinf().any()) else Kind.BEYOND
    value = part.reshape(-1)[element]
    value = value.float() if value.dtype.is_floating_point and value.dtype.itemsize == 1 else value
    return Kind.NAN if bool(value.isnan()) else Kind.INFINITE if bool(value.isinf()) else Kind.BEYOND


def number_in_shape(place: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """An element by its place in memory, as its number in the order of the shape.

    >>> [number_in_shape(place, (2, 3), (1, 2)) for place in range(6)]
    [0, 3, 1, 4, 2, 5]
    """
    if not is_dense(shape, stride):  # in a bucket it is contiguous
        return place
    number = 0
    for dimension in sorted(range(len(shape)), key=lambda d: -stride[d]):
        if shape[dimension] > 1:
            at, place = divmod(place, stride[dimension])
            number += at * math.prod(shape[dimension + 1 :])
    return number

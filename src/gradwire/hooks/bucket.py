"""What a communication hook sees of a bucket: `BucketSpec`, pure data, `Slices` of it, and `GradBucket`, the bucket itself.

`GradBucket` has the methods of torch's class, so hooks written for torch run on it unchanged, and also the parameters' names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """Which parameters share a bucket, and the place of each in it. The same on every rank."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False
    numel: int = field(init=False, repr=False, compare=False)
    """Elements of the whole bucket."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", sum(self.numels))

    @classmethod
    def of(cls, index: int, named: Sequence[tuple[str, Tensor]], like: Tensor) -> BucketSpec:
        """The bucket of these parameters, of which only shapes and strides are read, with gradients like `like`."""
        shapes = tuple(tuple(p.shape) for _, p in named)
        strides = tuple(tuple(p.stride()) for _, p in named)
        return cls(index, tuple(name for name, _ in named), shapes, strides, like.dtype, like.device, like.is_sparse)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole bucket."""
        return self.numel * self.dtype.itemsize

    @property
    def numels(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return tuple(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat buffer."""
        return tuple(accumulate(self.numels, initial=0))[:-1]

    def select(self, members: Sequence[int]) -> BucketSpec:
        """A bucket with only these of the parameters."""
        kept: Any = {key: tuple(getattr(self, key)[i] for i in members) for key in ("names", "shapes", "strides")}
        return replace(self, **kept)

    def __str__(self) -> str:
        names = ", ".join(self.names[:4])
        more = f" and {len(self.names) - 4} more" if len(self.names) > 4 else ""
        return f"bucket {self.index} (parameters {names}{more})"

    def views(self, buffer: Tensor) -> list[Tensor]:
        """A view of `buffer` for each parameter, in its shape and, if it is dense, its strides."""
        flat, found = buffer.view(-1), []
        for offset, numel, shape, stride in zip(self.offsets, self.numels, self.shapes, self.strides, strict=True):
            if is_dense(shape, stride):
                found.append(flat.as_strided(shape, stride, flat.storage_offset() + offset))
            else:
                found.append(flat.narrow(0, offset, numel).view(shape))
        return found


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in any order (as in channels_last)."""
    expected = 1
    for step, length in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= length
    return True


@dataclass(frozen=True, slots=True)
class Slices:
    """Contiguous ranges of a flat buffer, each an offset and a length, in the order in which they are gathered into a row."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]]) -> Slices:
        """These ranges, with adjacent ones merged and empty ones left out.

        >>> Slices.of([(0, 2), (2, 3), (9, 0), (7, 1)]).ranges
        ((0, 5), (7, 1))
        """
        merged: list[tuple[int, int]] = []
        for offset, length in ranges:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            elif length:
                merged.append((offset, length))
        return cls(tuple(merged))

    @property
    def numel(self) -> int:
        return sum(length for _, length in self.ranges)

    def within(self, start: int, length: int, *, origin: int = 0) -> Slices:
        """What is in this range of the buffer, with offsets from `origin`.

        >>> Slices(((0, 4), (6, 4))).within(2, 6, origin=2).ranges
        ((0, 2), (4, 2))
        """
        ends = [(max(offset, start), min(offset + n, start + length)) for offset, n in self.ranges]
        return Slices.of([(low - origin, high - low) for low, high in ends if low < high])

    def take(self, flat: Tensor) -> Tensor:
        """The slices of `flat` in one row: a view if there is only one."""
        views = self._views(flat)
        return views[0] if len(views) == 1 else torch.cat(views) if views else flat[:0]

    def room(self, flat: Tensor) -> Tensor:
        """Memory for a row that `put` then writes to `flat`: a view of `flat` if there is only one slice."""
        return self.take(flat) if len(self.ranges) == 1 else flat.new_empty(self.numel)

    def put(self, flat: Tensor, row: Tensor) -> None:
        """Write `row` to the slices of `flat`; nothing if it is a view of them."""
        views = self._views(flat)
        if len(views) == 1 and views[0].data_ptr() == row.data_ptr():
            return
        if views:
            torch._foreach_copy_(views, list(row.view(-1).split([length for _, length in self.ranges])))

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat.narrow(0, offset, length) for offset, length in self.ranges]


class GradBucket:
    """The gradients of a bucket in one flat buffer (for a sparse parameter: the gradient itself)."""

    __slots__ = ("_buffer", "_gradients", "_is_last", "_parameters", "spec")

    def __init__(
        self,
        spec: BucketSpec,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        *,
        is_last: bool,
        views: list[Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self._buffer = buffer
        self._parameters = parameters
        self._is_last = is_last
        self._gradients = views

    def index(self) -> int:
        """The bucket's number, in launch order; the same on every rank."""
        return self.spec.index

    def buffer(self) -> Tensor:
        """The flat buffer of all gradients, not divided by the number of ranks."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer by one of the same length; `gradients()` are then views of it."""
        if not isinstance(buffer, Tensor) or (not buffer.is_sparse and buffer.numel() != self._buffer.numel()):
            raise UsageError(
                f"set_buffer on bucket {self.index()}: expected a tensor of {self._buffer.numel()} elements, got "
                f"{list(buffer.shape) if isinstance(buffer, Tensor) else type(buffer).__name__}."
            )
        self._buffer = buffer
        self._gradients = None

    def gradients(self) -> list[Tensor]:
        """The gradients in their parameters' shapes: views of the buffer, or the gradient of a sparse parameter."""
        if self._gradients is None:
            self._gradients = [self._buffer] if self._buffer.is_sparse else self.spec.views(self._buffer)
        return list(self._gradients)

    def parameters(self) -> list[Tensor]:
        """The parameters themselves; `parameters()[i]` belongs to `gradients()[i]`."""
        return list(self._parameters)

    def names(self) -> tuple[str, ...]:
        """The parameters' full names."""
        return self.spec.names

    def is_last(self) -> bool:
        """Whether this is the last bucket launched in this backward."""
        return self._is_last

    def __repr__(self) -> str:
        return (
            f"GradBucket(index={self.index()}, parameters={list(self.spec.names)}, buffer={tuple(self._buffer.shape)})"
        )

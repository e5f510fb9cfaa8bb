"""Slices of a flat buffer, gathered into one tensor and written back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slices:
    """Contiguous ranges of a flat buffer, each an offset and a length, in the order in which they are gathered."""

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
        """Elements of all slices."""
        return sum(length for _, length in self.ranges)

    def take(self, flat: Tensor) -> Tensor:
        """The slices of `flat` in one row: a view if there is only one."""
        views = self._views(flat)
        return views[0] if len(views) == 1 else torch.cat(views) if views else flat[:0]

    def room(self, flat: Tensor) -> Tensor:
        """Memory for a row that `put` then writes to `flat`: a view of `flat` if there is only one slice."""
        return self.take(flat) if len(self.ranges) == 1 else flat.new_empty(self.numel)

    def copy(self, flat: Tensor, row: Tensor) -> None:
        """Write what `take` returns to the beginning of `row`."""
        views = self._views(flat)
        if views:
            torch.cat(views, out=row[: self.numel])

    def put(self, flat: Tensor, row: Tensor) -> None:
        """Write `row` to the slices of `flat`; nothing if it is a view of them."""
        views = self._views(flat)
        if len(views) == 1 and views[0].data_ptr() == row.data_ptr():
            return
        if views:
            torch._foreach_copy_(views, list(row.view(-1).split([length for _, length in self.ranges])))

    def add(self, flat: Tensor, row: Tensor) -> None:
        """Add `row` to the slices of `flat`."""
        views = self._views(flat)
        for view, piece in zip(views, row.view(-1).split([length for _, length in self.ranges]), strict=bool(views)):
            view.add_(piece)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat.narrow(0, offset, length) for offset, length in self.ranges]

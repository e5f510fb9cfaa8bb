"""Pieces of a flat buffer, taken out as one tensor and put back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pieces:
    """Unbroken stretches of a flat buffer, each an offset and a length, in the order in which they are taken."""

    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int]]) -> Pieces:
        """These stretches; neighbours become one, and empty ones are left out.

        >>> Pieces.of([(0, 2), (2, 3), (9, 0), (7, 1)]).runs
        ((0, 5), (7, 1))
        """
        joined: list[tuple[int, int]] = []
        for offset, length in runs:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            elif length:
                joined.append((offset, length))
        return cls(tuple(joined))

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return sum(length for _, length in self.runs)

    def take(self, flat: Tensor) -> Tensor:
        """The pieces of `flat`, in one row: a view where there is but one."""
        views = self._views(flat)
        return views[0] if len(views) == 1 else torch.cat(views) if views else flat[:0]

    def copy(self, flat: Tensor, row: Tensor) -> None:
        """What `take` gives, at the beginning of `row`."""
        views = self._views(flat)
        if views:
            torch.cat(views, out=row[: self.numel])

    def put(self, flat: Tensor, row: Tensor) -> None:
        """Write what `take` gave back to its places, unless it is the very memory."""
        views = self._views(flat)
        if len(views) == 1 and views[0].data_ptr() == row.data_ptr():
            return
        if views:
            torch._foreach_copy_(views, list(row.view(-1).split([length for _, length in self.runs])))

    def add(self, flat: Tensor, row: Tensor) -> None:
        """Add `row` to the pieces of `flat`."""
        views = self._views(flat)
        for view, piece in zip(views, row.view(-1).split([length for _, length in self.runs]), strict=bool(views)):
            view.add_(piece)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat.narrow(0, offset, length) for offset, length in self.runs]

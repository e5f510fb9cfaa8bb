"""Lists of places and values: what sparse hooks send instead of the bucket, as bytes in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.collectives.lower import as_bytes
from gradwire.errors import UsageError


class Pairs(NamedTuple):
    """Some elements: where they are, and what they are."""

    places: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """How pairs become bytes: all values, then all places. No padding, so the bytes are those of the two lists."""

    values: torch.dtype
    places: torch.dtype = torch.int32

    @property
    def nbytes(self) -> int:
        """The bytes of one pair."""
        return self.values.itemsize + self.places.itemsize

    def pack(self, pairs: Pairs) -> Tensor:
        """Pairs as bytes; both lists must have the format's dtypes."""
        return torch.cat([as_bytes(pairs.values.contiguous()), as_bytes(pairs.places.contiguous())])

    def unpack(self, packed: Tensor) -> Pairs:
        """The pairs in a row of bytes, which may begin anywhere in memory."""
        cut = packed.numel() // self.nbytes * self.values.itemsize
        # Copies, since a list of wide numbers may only begin at a multiple of their size.
        return Pairs(packed[cut:].clone().view(self.places), packed[:cut].clone().view(self.values))

    def check(self, numel: int, what: object) -> None:
        """Raise unless places up to `numel` can be written down."""
        if numel > torch.iinfo(self.places).max:
            raise UsageError(
                f"{what!r} on a bucket of {numel} elements: places in it travel as {self.places}, which is too narrow. Until the "
                "first step has shown the order of gradients all parameters are one bucket: pass Buckets(from_start=True) to "
                "replicate(), whose limit then holds from the start, or give a parameter as large as this mean() by partition()."
            )


def scatter(pairs: Pairs, numel: int, dtype: torch.dtype) -> Tensor:
    """A row of zeros with the values in their places."""
    row = torch.zeros(numel, dtype=dtype, device=pairs.values.device)
    return row.index_copy_(0, pairs.places.long(), pairs.values.to(dtype))


def add_up(lists: list[Pairs], numel: int, dtype: torch.dtype, *, divisor: int) -> Tensor:
    """The mean of rows that are given as pairs, added in the order of the lists, so everybody gets the same bits.

    No list names a place twice, so no addition depends on the order of a device's threads either.
    """
    row = torch.zeros(numel, dtype=dtype, device=lists[0].values.device)
    for places, values in lists:
        row.index_add_(0, places, values.to(dtype).div_(divisor))
    return row

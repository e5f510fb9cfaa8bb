"""Lists of indices and values: what sparse hooks send instead of the bucket, packed into one tensor of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.collectives.lower import as_bytes
from gradwire.errors import UsageError


class Pairs(NamedTuple):
    """Some elements of a row: their indices and their values."""

    indices: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """The packing of pairs: all values, then all indices, without padding."""

    values: torch.dtype
    indices: torch.dtype = torch.int32

    @property
    def nbytes(self) -> int:
        """The bytes of one pair."""
        return self.values.itemsize + self.indices.itemsize

    def pack(self, pairs: Pairs) -> Tensor:
        """Pairs as bytes; both lists must have the format's dtypes."""
        return torch.cat([as_bytes(pairs.values.contiguous()), as_bytes(pairs.indices.contiguous())])

    def unpack(self, packed: Tensor) -> Pairs:
        """The pairs in a row of bytes, which may begin anywhere in memory."""
        cut = packed.numel() // self.nbytes * self.values.itemsize
        # Copies, because a view in a wider dtype must be aligned to its size.
        return Pairs(packed[cut:].clone().view(self.indices), packed[:cut].clone().view(self.values))

    def check(self, numel: int, what: object) -> None:
        """Raise unless indices up to `numel` fit their dtype."""
        if numel > torch.iinfo(self.indices).max:
            raise UsageError(
                f"{what!r} on a bucket of {numel} elements: indices are sent as {self.indices}, which is too narrow. Until the "
                "first step has shown the order of gradients all parameters are one bucket: pass Buckets(from_start=True) to "
                "replicate(), whose limit then holds from the start, or give a parameter as large as this mean() by partition()."
            )


def scatter(pairs: Pairs, numel: int, dtype: torch.dtype) -> Tensor:
    """A row of zeros with the values at their indices."""
    row = torch.zeros(numel, dtype=dtype, device=pairs.values.device)
    return row.index_copy_(0, pairs.indices.long(), pairs.values.to(dtype))


def add_up(lists: list[Pairs], numel: int, dtype: torch.dtype, *, divisor: int) -> Tensor:
    """The mean of rows given as pairs, added in the order of the lists, so that every rank computes the same bits.

    No list contains an index twice, so no addition depends on the order of a device's threads either.
    """
    row = torch.zeros(numel, dtype=dtype, device=lists[0].values.device)
    for indices, values in lists:
        row.index_add_(0, indices, values.to(dtype).div_(divisor))
    return row

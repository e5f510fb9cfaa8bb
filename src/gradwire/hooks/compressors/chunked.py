"""Chunked top-k: the k largest of every `chunk` elements, with indices of few bits and, if wanted, values of two.

An index in a chunk of 4,096 elements has 12 bits, one in a bucket 32. A chunk is a range of the bucket; the last one is padded with
zeros. As in `sparse`, each rank chooses its own elements, so the lists are gathered, and what was not sent needs error feedback.

Note [Two bits]
A sign and one bit of magnitude. The elements that a chunk sends are divided at their mean magnitude, and the mean magnitudes of
both parts are its two levels, sent in bfloat16. No level is near zero, where none of the largest elements is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import all_gather_into_tensor
from gradwire.collectives.lower import as_bytes
from gradwire.errors import UsageError
from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Turn, always_alike
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.compressors.sparse import Pairs, SendsPairs
from gradwire.hooks.numerics.elementwise import as_dtype, count, number_dtype, padded, real


def pack(codes: Tensor, width: int) -> Tensor:
    """Rows of integers of `width` bits as rows of bytes, the lowest bits first, each row padded to whole bytes.

    >>> pack(torch.tensor([[0x123, 0x456]]), 12).tolist() == [[0x23, 0x61, 0x45]]
    True
    """
    bits = _bits(codes, width)
    missing = -bits.shape[1] % 8
    return _join(torch.nn.functional.pad(bits, (0, missing)), 8).to(torch.uint8)


def unpack(packed: Tensor, width: int, number: int) -> Tensor:
    """The inverse of `pack`, for rows of `number` integers."""
    return _join(_bits(packed.int(), 8)[:, : number * width], width)


def _bits(codes: Tensor, width: int) -> Tensor:
    return ((codes.unsqueeze(-1) >> torch.arange(width, device=codes.device)) & 1).flatten(1)


def _join(bits: Tensor, width: int) -> Tensor:
    places = torch.arange(width, device=bits.device)
    return (bits.view(len(bits), bits.shape[1] // width, width) << places).sum(-1)


@dataclass(frozen=True, slots=True, repr=False)
class ChunkedTopK(CommHook):
    k: int
    chunk: int
    bits: int | None

    made_by = "chunked_top_k"
    collectives = 1
    capture_key = always_alike
    dense_only = True
    alone = SendsPairs.alone

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        chunks, dtype = self._chunks(turn.spec), turn.spec.dtype
        rows = padded(real(grad).to(number_dtype(dtype)), chunks * self.chunk).view(chunks, self.chunk)
        indices = torch.topk(rows.abs(), self.k, sorted=False).indices
        message = self._encode(Pairs(indices, rows.gather(1, indices)), dtype.to_real())
        gathered = message.new_empty(turn.world_size, *message.shape)
        yield all_gather_into_tensor(gathered.view(-1), message.view(-1), label=f"bucket {turn.spec.index}")
        value = torch.zeros_like(rows)
        for one in gathered:  # in rank order, and no index twice in a row: the same bits everywhere
            indices, values = self._decode(one, rows.dtype, dtype.to_real())
            value.scatter_add_(1, indices, values.div_(turn.counted))
        sent = value  # not needed if donated
        if not turn.donated:
            sent = torch.zeros_like(rows).scatter_(1, *self._decode(message, rows.dtype, dtype.to_real()))
        return Reduced(*(as_dtype(row.view(-1)[: count(turn.spec)], dtype) for row in (value, sent)))

    def _chunks(self, spec: BucketSpec) -> int:
        return -(-count(spec) // self.chunk)

    @property
    def _index_bits(self) -> int:
        return (self.chunk - 1).bit_length() or 1

    def _head(self, dtype: torch.dtype) -> int:
        """The bytes in front of the packed codes: two levels, or all values."""
        return 4 if self.bits else self.k * dtype.itemsize

    def _encode(self, chosen: Pairs, dtype: torch.dtype) -> Tensor:
        """A row of bytes for each chunk. See Note [Two bits]."""
        indices, values = chosen
        if self.bits is None:
            return torch.cat([_as_rows(values.to(dtype)), pack(indices, self._index_bits)], 1)
        magnitude = values.abs()
        large = magnitude > magnitude.mean(1, keepdim=True)
        # With a NaN or infinity no element is above the mean, so the lower level, which all elements get, is not finite.
        levels = [torch.where(part, magnitude, 0).sum(1) / part.sum(1).clamp(min=1) for part in (~large, large)]
        codes = (indices << 2) | (values < 0).long() << 1 | large.long()
        return torch.cat([_as_rows(torch.stack(levels, 1).bfloat16()), pack(codes, self._index_bits + 2)], 1)

    def _decode(self, message: Tensor, number: torch.dtype, dtype: torch.dtype) -> Pairs:
        head, packed = message.split([self._head(dtype), message.shape[1] - self._head(dtype)], 1)
        numbers = head.reshape(-1).clone().view(torch.bfloat16 if self.bits else dtype).to(number)
        if self.bits is None:
            return Pairs(unpack(packed, self._index_bits, self.k), numbers.view(len(message), self.k))
        codes = unpack(packed, self._index_bits + 2, self.k)
        return Pairs(codes >> 2, numbers.view(len(message), 2).gather(1, codes & 1) * (1 - (codes & 2)))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        packed = -(-self.k * (self._index_bits + (self.bits or 0)) // 8)
        return (world_size - 1) * self._chunks(spec) * (self._head(spec.dtype.to_real()) + packed)


def _as_rows(values: Tensor) -> Tensor:
    return as_bytes(values.contiguous()).view(len(values), values.shape[1] * values.itemsize)


@checks_arguments(k="[1, inf)", chunk="[1, inf)")
def chunked_top_k(k: int = 64, *, chunk: int = 4096, bits: int | None = None) -> CommHook:
    """Send the `k` elements of largest magnitude of every `chunk` elements of the bucket. (SparseLoCo, arXiv 2508.15706)

    With `bits=2` a value is its sign and one of the two levels of its chunk; otherwise it has the gradient's dtype. What is left
    out or rounded is lost, so put `error_feedback()` around it. Indices are shorter than those of `top_k`, but every chunk sends
    the same number of elements.

    On the wire, for n ranks: (n - 1) times the number of chunks times k (b + 2) / 8 + 4 bytes with two bits, or k (b / 8 +
    itemsize) without; b is the bits of an index, 12 for 4,096. With k = 64, a rank's message is 141 times smaller than float32.

    >>> from gradwire.testing import simulate
    >>> done = simulate(
    ...     chunked_top_k(1, chunk=2), [torch.tensor([5.0, 1.0, 0.0, 2.0]), torch.tensor([2.0, -3.0, 4.0, 0.0])]
    ... )
    >>> done.reduced[0].value
    tensor([ 2.5000, -1.5000,  2.0000,  1.0000])
    """
    if bits not in (None, 2):
        raise UsageError(f"chunked_top_k(bits={bits}): values have 2 bits or are not rounded. Pass 2, or None.")
    if k > chunk:
        raise UsageError(
            f"chunked_top_k({k}, chunk={chunk}): a chunk has only {chunk} elements. Pass a smaller k, or a larger chunk."
        )
    return ChunkedTopK(k, chunk, bits)

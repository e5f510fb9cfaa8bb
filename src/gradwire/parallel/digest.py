"""A digest of 8 bytes of a tensor's bits, the same on the CPU and on a GPU, where it is computed without a copy to the host.

Each word of 64 bits, plus a multiple of its place, goes through the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable
Pseudorandom Number Generators, 2014), and the results are added up. The finalizer is a bijection, so one flipped bit cannot be
missed; changes in several words cancel with a probability of about 2**-64. About 1 ms per MB on one core.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.errors import UsageError


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, 1))
_CPU_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
"""Words that are mixed at a time: on the CPU, as many as stay in its cache; on a GPU, enough to keep it busy."""


@torch.no_grad()
def digest(t: Tensor) -> Tensor:
    """The digest of all elements, in the order of the shape, whatever their order in memory: an int64 on the tensor's device.

    >>> a = torch.zeros(3)
    >>> bool(digest(a) == digest(torch.zeros(3))), bool(digest(a) == digest(-a))
    (True, False)
    """
    if t.layout is not torch.strided or t.is_meta:
        raise UsageError(
            f"digest of a {'meta' if t.is_meta else t.layout} tensor: it has no bytes that could be compared."
        )
    data = t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # words must be aligned
    whole = data.numel() // 8
    total = torch.full((1,), _signed(_GOLDEN), dtype=torch.int64, device=t.device) * (data.numel() + 1)
    _mix_(total)
    chunk = min(whole, _CPU_CHUNK if t.device.type == "cpu" else _GPU_CHUNK)
    if whole:
        places = torch.arange(1, chunk + 1, device=t.device) * _signed(_GOLDEN)
        for number, words in enumerate(data[: 8 * whole].view(torch.int64).split(chunk)):
            shift = _signed(number * chunk * _GOLDEN % (1 << 64))
            total += _mix_((words + places[: words.numel()]).add_(shift)).sum()
    if data.numel() % 8:
        last = torch.zeros(8, dtype=torch.uint8, device=t.device)
        last[: data.numel() % 8] = data[8 * whole :]
        total += _mix_(last.view(torch.int64) + _signed((whole + 1) * _GOLDEN % (1 << 64)))
    return total[0]


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The digest of each tensor, on `device`."""
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.stack([digest(t).to(device) for t in tensors])


def _mix_(z: Tensor) -> Tensor:
    """The finalizer of splitmix64, in place. Integers wrap around, and shifts of int64 keep the sign, which is masked."""
    for bits, factor in _ROUNDS:
        z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))
        if factor != 1:
            z.mul_(factor)
    return z

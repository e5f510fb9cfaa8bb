"""The k elements of largest magnitude: exact, and faster than a sort.

Magnitudes are compared as the integers of their bits, which have the same order, with NaN above infinity: a NaN is never dropped.
Ties go to the lower index. On the CPU a sample gives a bound that slightly more than k elements reach, and the k largest of those
are selected exactly; if too few or far too many reach it, and on CUDA, where the host would wait, topk runs on all elements.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.runtime.jit import loop

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 16384
_BLOCK = 32
"""Elements that the compiled loop tests together before it tests them one by one."""


@loop
def _collect(bits: Any, mask: Any, bound: Any, out: Any) -> int:  # pragma: no cover - compiled
    """Write the indices of all elements with a magnitude of at least `bound` to `out` while it has room; return their number."""
    found = 0
    whole = len(bits) // _BLOCK * _BLOCK
    for start in range(0, whole, _BLOCK):
        some = np.int32(0)
        for i in range(start, start + _BLOCK):
            some |= np.int32((bits[i] & mask) >= bound)
        if some:
            for i in range(start, start + _BLOCK):
                if (bits[i] & mask) >= bound:
                    if found < len(out):
                        out[found] = i
                    found += 1
    for i in range(whole, len(bits)):
        if (bits[i] & mask) >= bound:
            if found < len(out):
                out[found] = i
            found += 1
    return found


def largest(flat: Tensor, k: int) -> Tensor:
    """The int64 indices of the `k` elements of largest magnitude in a flat real tensor, ascending (on CUDA: in any order).

    >>> largest(torch.tensor([1.0, -3.0, 0.5, 3.0, 2.0]), 2)
    tensor([1, 3])
    """
    numel = flat.numel()
    if k >= numel:
        return torch.arange(numel, device=flat.device)
    bits = flat.detach().contiguous().view(_BITS[flat.dtype.itemsize])
    if bits.device.type != "cpu":
        return torch.topk(_magnitude(bits), k, sorted=False).indices
    if k == 0:
        return flat.new_empty(0, dtype=torch.int64)
    if numel > 4 * _SAMPLE and 4 * k <= numel:
        bound = _estimate(bits, k)
        found = _at_least(bits, bound, limit=4 * k)
        if found is None and bound < torch.iinfo(bits.dtype).max:
            # Many elements are equal to the bound: usually zeros.
            found = _at_least(bits, bound + 1, limit=4 * k)
            if found is not None and len(found) < k:
                equal = (_magnitude(bits) == bound).nonzero().view(-1)[: k - len(found)]
                return torch.cat([found, equal]).sort().values
        if found is not None and len(found) >= k:
            return found[_exact(_magnitude(bits[found]), k)]
    return _exact(_magnitude(bits), k)


def reaching(flat: Tensor, bound: Tensor) -> Tensor:
    """The indices of the non-zero elements with a magnitude of at least `bound`, a scalar of the same dtype; ascending.

    A NaN reaches every bound. On CUDA the host waits for their number.

    >>> reaching(torch.tensor([1.0, -3.0, 0.0, 3.0]), torch.tensor(2.0))
    tensor([1, 3])
    """
    bits = flat.detach().contiguous().view(_BITS[flat.dtype.itemsize])
    least = _magnitude(bound.view(bits.dtype)).clamp(min=1)
    if bits.device.type != "cpu":
        return (_magnitude(bits) >= least).nonzero().view(-1)
    found = _at_least(bits, int(least), limit=flat.numel())
    assert found is not None  # `limit` is the number of elements
    return found


def _magnitude(bits: Tensor) -> Tensor:
    return bits & torch.iinfo(bits.dtype).max


def _estimate(bits: Tensor, k: int) -> int:
    numel = bits.numel()
    step = max(1, min(numel // _SAMPLE, k // 64))
    sample = _magnitude(bits[::step].contiguous())
    expected = k * sample.numel() / numel
    wanted = min(sample.numel(), math.ceil(1.15 * expected + 3 * math.sqrt(expected)))
    return int(torch.topk(sample, wanted, sorted=False).values.min())


def _at_least(bits: Tensor, bound: int, *, limit: int) -> Tensor | None:
    """The indices of all elements of at least that magnitude, ascending; None if there are more than `limit`."""
    compiled = _collect.compiled()
    if compiled is None:
        found = (_magnitude(bits) >= bound).nonzero().view(-1)
        return found if len(found) <= limit else None
    array = bits.numpy()
    out = np.empty(limit, dtype=np.int64)
    number = compiled(array, array.dtype.type(np.iinfo(array.dtype).max), array.dtype.type(bound), out)
    return torch.from_numpy(out[:number]) if number <= limit else None


def _exact(magnitude: Tensor, k: int) -> Tensor:
    if k == magnitude.numel():
        return torch.arange(k, device=magnitude.device)
    least = torch.topk(magnitude, k, sorted=False).values.min()
    above = magnitude > least
    missing = k - int(above.sum())
    above[(magnitude == least).nonzero().view(-1)[:missing]] = True
    return above.nonzero().view(-1)

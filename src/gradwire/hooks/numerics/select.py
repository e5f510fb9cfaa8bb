"""The k elements of largest magnitude: exact, and quicker than a sort.

Note [Largest by bits]
The bits of |x|, read as an integer, are ordered as |x| is, with NaN above infinity. So integers are compared, a NaN is always
among the largest and cannot be dropped in silence, and equal magnitudes are told apart by their place: the first wins.

Note [Guess, then be exact]
torch.topk of one element in a hundred of a whole bucket takes ten times as long as one pass that collects all elements above a
bound. A sample gives a bound that a few too many reach; of those the k largest are then found exactly. If fewer than k reach
it, or far too many, the guess was bad and topk looks at all. The result does not depend on the guess, and no chance is in it.
On CUDA, where a collected list would make the host wait for its length, it is topk at once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.jit import loop

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SAMPLE = 16384
"""Elements of a sample, at least."""
_BLOCK = 32
"""Elements that the compiled loop looks at before it asks which of them it was."""


@loop
def _collect(bits: Any, mask: Any, bound: Any, out: Any) -> int:  # pragma: no cover - compiled
    """The places of all elements whose magnitude is at least `bound`, as many as `out` has room for; how many there are."""
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
    """The places of the `k` elements of largest magnitude in a flat real tensor, in ascending order (on CUDA: in any), as int64.

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
        bound = _guess(bits, k)
        found = _at_least(bits, bound, limit=4 * k)
        if found is None and bound < torch.iinfo(bits.dtype).max:
            # Many elements are exactly as large as the bound: zeros, as a rule.
            found = _at_least(bits, bound + 1, limit=4 * k)
            if found is not None and len(found) < k:
                return _merge(found, (_magnitude(bits) == bound).nonzero().view(-1)[: k - len(found)])
        if found is not None and len(found) >= k:
            return found[_exact(_magnitude(bits[found]), k)]
    return _exact(_magnitude(bits), k)


def reaching(flat: Tensor, bound: Tensor) -> Tensor:
    """The places of the elements whose magnitude is at least `bound`, a number of the same dtype, and not zero; ascending.

    A NaN reaches every bound. On CUDA the host waits for how many they are.

    >>> reaching(torch.tensor([1.0, -3.0, 0.0, 3.0]), torch.tensor(2.0))
    tensor([1, 3])
    """
    bits = flat.detach().contiguous().view(_BITS[flat.dtype.itemsize])
    least = _magnitude(bound.view(bits.dtype)).clamp(min=1)
    if bits.device.type != "cpu":
        return (_magnitude(bits) >= least).nonzero().view(-1)
    found = _at_least(bits, int(least), limit=flat.numel())
    assert found is not None  # there is room for all
    return found


def _magnitude(bits: Tensor) -> Tensor:
    return bits & torch.iinfo(bits.dtype).max


def _guess(bits: Tensor, k: int) -> int:
    """A bound that a little more than `k` elements should reach."""
    numel = bits.numel()
    step = max(1, min(numel // _SAMPLE, k // 64))
    sample = _magnitude(bits[::step].contiguous())
    expected = k * sample.numel() / numel
    wanted = min(sample.numel(), math.ceil(1.15 * expected + 3 * math.sqrt(expected)))
    return int(torch.topk(sample, wanted, sorted=False).values.min())


def _at_least(bits: Tensor, bound: int, *, limit: int) -> Tensor | None:
    """The places of all elements of at least that magnitude, ascending; None if they are more than `limit`."""
    compiled = _collect.compiled()
    if compiled is None:
        found = (_magnitude(bits) >= bound).nonzero().view(-1)
        return found if len(found) <= limit else None
    array = bits.numpy()
    out = np.empty(limit, dtype=np.int64)
    number = compiled(array, array.dtype.type(np.iinfo(array.dtype).max), array.dtype.type(bound), out)
    return torch.from_numpy(out[:number]) if number <= limit else None


def _exact(magnitude: Tensor, k: int) -> Tensor:
    """The places of the k largest; of equal ones, the first."""
    if k == magnitude.numel():
        return torch.arange(k, device=magnitude.device)
    least = torch.topk(magnitude, k, sorted=False).values.min()
    above = magnitude > least
    missing = k - int(above.sum())
    above[(magnitude == least).nonzero().view(-1)[:missing]] = True
    return above.nonzero().view(-1)


def _merge(some: Tensor, others: Tensor) -> Tensor:
    return torch.cat([some, others]).sort().values

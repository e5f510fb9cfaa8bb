"""Where tensors lie in memory, and which of them share some of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def span(t: Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies, from and to; (0, 0) for an empty or sparse one."""
    if t.layout is not torch.strided or not t.numel():
        return 0, 0
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.nbytes
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def overlapping(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Two of the tensors, each of which may be written, that share memory; a tensor that overlaps itself is returned twice."""
    for t in tensors:
        if not t.is_sparse and not t.is_contiguous() and _overlaps_itself(t):
            return t, t
    spans = sorted(map(span, tensors))
    if all(end <= start for (_, end), (start, _) in pairwise(spans)):
        return None
    open_: list[tuple[int, Tensor]] = []  # those that reach beyond the start of the current one
    for start, end, t in sorted(((*span(t), t) for t in tensors), key=lambda entry: entry[0]):
        if start == end:
            continue
        open_ = [(reach, other) for reach, other in open_ if reach > start]
        for _, other in open_:
            if _share(other, t):
                return other, t
        open_.append((end, t))
    return None


def _overlaps_itself(t: Tensor) -> bool:
    """Whether two elements of `t` are in one place."""
    dims = sorted((stride, n) for n, stride in zip(t.shape, t.stride(), strict=True) if n > 1)
    reach = 1
    for stride, n in dims:
        if stride < reach:
            break
        reach = (n - 1) * stride + reach
    else:
        return False
    if not t.numel():
        return False
    if dims[0][0] == 0:
        return True
    (start, end), width = span(t), t.element_size()
    return int(_footprint(t, start, end, width).sum()) < t.numel()


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    (low, high), (start, end) = span(a), span(b)
    low, high = min(low, start), max(high, end)
    unit = math.gcd(a.element_size(), b.element_size(), abs(a.data_ptr() - b.data_ptr()))
    return bool((_footprint(a, low, high, unit) & _footprint(b, low, high, unit)).any())


def _footprint(t: Tensor, low: int, high: int, unit: int) -> Tensor:
    """Which units of memory, of those from `low` to `high`, belong to elements of `t`."""
    places = torch.zeros((high - low) // unit, dtype=torch.bool, device="cpu")
    per = t.element_size() // unit
    strides = [stride * per for stride in t.stride()]
    places.as_strided((*t.shape, per), (*strides, 1), (t.data_ptr() - low) // unit).fill_(True)
    return places

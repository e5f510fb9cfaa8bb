"""Whether tensors hold NaN or infinity: a cheap test in one pass, the exact one, and where the first such element is.

Note [One pass]
A sum is not finite if an element is not, whatever the order of additions: NaN stays NaN, infinity stays infinity or becomes NaN.
The converse does not hold, because finite elements may overflow; so a finite sum proves that all elements are, and one that is not
is checked exactly. It reads memory once, at full speed, where `torch.isfinite(t).all()` writes a tensor in between and takes thirty
times as long on the CPU. 16-bit floats are summed in float32, or compared (float16 on the CPU, where torch would copy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives.op_kinds import ALWAYS_FINITE

MAX_NORM_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Real dtypes whose maximum norm is finite exactly if all elements are."""


def probe(t: Tensor, *, narrow: torch.dtype | None = None) -> Tensor:
    """A number on the device of `t` that is not finite if an element is not; rarely also if all are. See Note [One pass].

    `narrow`: a dtype to which elements will be converted; those beyond its range count as infinite. Never waits for the device.

    >>> probe(torch.tensor([1.0, float("inf"), 2.0])).isfinite().item(), probe(torch.ones(3)).isfinite().item()
    (False, True)
    """
    values = _values(t)
    if values is None:
        return torch.zeros((), device=t.device)
    if narrow is not None and narrow.is_floating_point and narrow != values.dtype:
        return torch.stack(torch.aminmax(values)).to(narrow).float().sum()
    if values.device.type != "cpu":
        return values.sum(dtype=torch.float32 if values.dtype.itemsize == 2 else None)
    if values.dtype == torch.float16:
        low, high = torch.aminmax(values)
        return high.float() - low.float()
    return values.sum()


def max_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value of each tensor, on its device; NaN if an element is NaN. Never waits for the device.

    >>> max_norms([torch.tensor([1.0, -3.0]), torch.tensor([float("nan"), 1.0]), torch.ones(0)])
    [tensor(3.), tensor(nan), tensor(0.)]
    """
    plain = all(t.dtype in MAX_NORM_DTYPES and t.numel() and not t.is_sparse for t in tensors)
    values = list(tensors) if plain else [_values(t) for t in tensors]
    given = [v for v in values if v is not None]
    norms = iter(torch._foreach_norm(given, math.inf) if given else ())
    return [
        torch.zeros((), device=t.device) if v is None else next(norms) for t, v in zip(tensors, values, strict=True)
    ]


def overflow_limit(narrow: torch.dtype | None) -> float:
    """The least absolute value that is infinite in `narrow`, where it is rounded to nearest; infinity without one.

    >>> overflow_limit(torch.float16), overflow_limit(None)
    (65520.0, inf)
    """
    if narrow is None or not narrow.is_floating_point:
        return math.inf
    info = torch.finfo(narrow)
    return info.max * (2 - info.eps / 2) / (2 - info.eps)


def is_finite(t: Tensor) -> bool:
    """Whether all elements are finite."""
    return math.isfinite(probe(t).item()) or first_nonfinite(t) is None


def first_nonfinite(t: Tensor, *, narrow: torch.dtype | None = None) -> int | None:
    """The first element that is not finite, or not after conversion to `narrow`, counted in the order of the shape; or None.

    >>> first_nonfinite(torch.tensor([[1.0, 2.0], [float("nan"), 3.0]]))
    2
    """
    t = t.detach()
    if t.is_sparse:
        return _first_sparse(t, narrow)
    if not t.numel() or _values(t) is None:
        return None
    good = _elements_finite(t, narrow).reshape(-1)
    return None if bool(good.all()) else int(good.view(torch.uint8).argmin())


def _first_sparse(t: Tensor, narrow: torch.dtype | None) -> int | None:
    """Duplicate elements are checked one by one: an overflow of their sum is not in the tensor yet."""
    rows = t._values()
    if _values(t) is None:
        return None
    bad = (~_elements_finite(rows, narrow)).nonzero()
    if not len(bad):
        return None
    places = torch.cat([t._indices().T[bad[:, 0]], bad[:, 1:]], dim=1)
    strides = torch.tensor([math.prod(t.shape[i + 1 :]) for i in range(t.dim())], device=t.device)
    return int((places * strides).sum(dim=1).min())


def _elements_finite(t: Tensor, narrow: torch.dtype | None) -> Tensor:
    if t.dtype.is_floating_point and t.dtype.itemsize == 1:
        t = t.float()
    if narrow is not None and narrow.is_floating_point and t.dtype.is_floating_point:
        t = t.to(narrow)
    return torch.isfinite(t)


def _values(t: Tensor) -> Tensor | None:
    """The real numbers to check; None if there are none that could be other than finite."""
    t = t.detach()
    t = t._values() if t.is_sparse else t
    if not t.numel() or t.dtype in ALWAYS_FINITE or not (t.dtype.is_floating_point or t.dtype.is_complex):
        return None
    if t.dtype.is_complex:
        t = torch.view_as_real(t)
    return t.float() if t.dtype.itemsize == 1 else t

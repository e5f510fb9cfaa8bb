"""Orthonormal columns for batches of tall matrices, and products of many pairs of matrices, for low-rank hooks.

Note [Orthogonalization]
On the CPU: Householder QR, the fastest at ranks from 1 to 32. On CUDA, where a batched QR is slow: Cholesky-QR twice, a handful
of kernels, in float64 because the first pass squares the condition number. Linearly dependent columns become noise or zeros, never
longer than unit norm. Neither synchronizes with the host.

Note [Launches]
On a GPU launch overhead dominates. So factors of equal length are one batch, Gram matrices of all lengths are stored together,
there are kernels of our own if Triton is installed, and products are stacked where there are many of one shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.hooks.numerics.elementwise import GPU_KERNELS
from gradwire.runtime.jit import kernels

_MANY = 8
"""From this number of products of one shape on, operands are stacked for one batched product."""


def orthonormal(batches: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis of the columns of each matrix of each batch, [k, n, r] with r <= n; NaN for non-finite matrices."""
    if batches and batches[0].device.type == "cuda":
        return cholesky_qr(batches)
    # LAPACK may or may not propagate NaN; here it must.
    return [torch.linalg.qr(p)[0].add_(p.sum(dim=(1, 2), keepdim=True).mul_(0)) for p in batches]


def cholesky_qr(batches: Sequence[Tensor]) -> list[Tensor]:
    """Cholesky-QR twice, in float64. See Note [Orthogonalization]."""
    bases = [p.double() for p in batches]
    rank, counts = bases[0].shape[2], [len(p) for p in bases]
    gram = bases[0].new_empty(sum(counts), rank, rank)
    for _ in range(2):
        for basis, block in zip(bases, gram.split(counts), strict=True):
            torch.bmm(basis.mT, basis, out=block)
        bases = [
            torch.bmm(basis, factor) for basis, factor in zip(bases, inverse_factors(gram).split(counts), strict=True)
        ]
    return [basis.to(p.dtype) for basis, p in zip(bases, batches, strict=True)]


def inverse_factors(gram: Tensor) -> Tensor:
    """L^-T for each G = L L^T of the batch, with a small term added to the diagonal; NaN for non-finite G. Rounding must not make a
    matrix indefinite, and a matrix of zeros must give zeros in the end."""
    fast = kernels(GPU_KERNELS) if gram.is_cuda else None
    if fast is not None:
        made: Tensor = fast.inverse_factors(gram)
        return made
    poison = gram.sum(dim=(1, 2), keepdim=True).mul_(0)
    gram = gram.clone()
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal.add_(diagonal.sum(1, keepdim=True).mul_(1e-15)).add_(torch.finfo(gram.dtype).tiny)
    factor, _ = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
    return inverse.mT + poison


def keep_directions(new: Sequence[Tensor], old: Sequence[Tensor]) -> None:
    """Write the columns of `new`, divided by their norm, to `old`; columns of zero or non-finite norm are left unchanged."""
    for n, o in zip(new, old, strict=True):
        length = n.norm(dim=1, keepdim=True)
        o.copy_(torch.where(torch.isfinite(length) & (length > 0), n / length, o))


def multiply(left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """`out[i] = left[i] @ right[i]`. See Note [Launches]; on the CPU nothing is stacked."""
    if len(out) < _MANY or out[0].device.type != "cuda":
        _each(left, right, out)
        return
    alike: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        alike.setdefault((a.shape, b.shape), []).append(i)
    for which in alike.values():
        lefts, rights, outs = ([each[i] for i in which] for each in (left, right, out))
        if len(which) < _MANY:
            _each(lefts, rights, outs)
        else:
            torch._foreach_copy_(outs, list(torch.bmm(torch.stack(lefts), torch.stack(rights)).unbind()))


def _each(left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    for a, b, c in zip(left, right, out, strict=True):
        if a.shape[1] == 1:  # an outer product: several times faster as a broadcast product
            torch.mul(a, b, out=c)
        elif not c.is_contiguous():
            torch.mm(b.mT, a.mT, out=c.mT)
        else:
            torch.mm(a, b, out=c)

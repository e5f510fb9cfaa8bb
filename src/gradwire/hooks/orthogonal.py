"""Orthonormal columns for batches of tall matrices, and products of many pairs of matrices: what low-rank hooks compute.

Note [Two ways to orthogonalise]
On the CPU Householder QR (LAPACK's) is the fastest of QR, Gram-Schmidt twice and Cholesky-QR twice at every rank from 1 to 32, and
orthonormal to rounding whatever the condition, also for columns that depend on each other. On CUDA a batched QR is slow, and
Gram-Schmidt is a chain of small kernels for each column; Cholesky-QR twice is a handful for all. Its first pass squares the
condition number, so it runs in float64, where that leaves eight digits; columns that depend on others come out as noise or zeros,
never as more than unit length. Neither synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def orthonormal(p: Tensor) -> Tensor:
    """A basis of the columns of each matrix of the batch `p`, [k, n, r] with r <= n. A matrix that is not finite gives NaN."""
    basis = _cholesky_qr(p) if p.device.type == "cuda" else torch.linalg.qr(p)[0]
    # Whether LAPACK or a Cholesky factorisation hands NaN on is left to them; here it has to show.
    return basis.add_(p.sum(dim=(1, 2), keepdim=True).mul_(0))


def _cholesky_qr(p: Tensor) -> Tensor:
    """Cholesky-QR twice, in float64. See Note [Two ways to orthogonalise]."""
    q = p.double()
    for _ in range(2):
        gram = torch.bmm(q.mT, q)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        # What is lost to rounding must not make the matrix indefinite; a matrix of zeros gives zeros.
        diagonal.add_(diagonal.sum(1, keepdim=True).mul_(1e-15)).add_(torch.finfo(torch.float64).tiny)
        factor, _ = torch.linalg.cholesky_ex(gram)
        q = torch.linalg.solve_triangular(factor, q.mT, upper=False).mT
    return q.to(p.dtype)


def multiply(left: Sequence[Tensor], right: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """`out[i] = left[i] @ right[i]`. On CUDA products of the same shape are one kernel; on the CPU nothing is copied for it."""
    if not out or out[0].device.type != "cuda":
        for a, b, c in zip(left, right, out, strict=True):
            if a.shape[1] == 1:  # a column times a row: several times faster as what it is
                torch.mul(a, b, out=c)
            elif not c.is_contiguous():
                torch.mm(b.mT, a.mT, out=c.mT)
            else:
                torch.mm(a, b, out=c)
        return
    alike: dict[tuple[torch.Size, torch.Size], list[int]] = {}
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        alike.setdefault((a.shape, b.shape), []).append(i)
    for which in alike.values():
        if len(which) == 1:
            torch.mm(left[which[0]], right[which[0]], out=out[which[0]])
            continue
        product = torch.bmm(torch.stack([left[i] for i in which]), torch.stack([right[i] for i in which]))
        torch._foreach_copy_([out[i] for i in which], list(product.unbind()))

"""What low-rank hooks compute on a GPU, against what they compute with torch alone. Skipped where there is no CUDA device."""

from itertools import accumulate

import pytest
import torch

from gradwire.hooks import chain, error_feedback, power_sgd
from gradwire.hooks.numerics.orthogonal import cholesky_qr, inverse_factors, keep_directions, multiply
from gradwire.testing import check_hook

pytestmark = pytest.mark.gpu


@pytest.fixture
def kernels():  # type: ignore[no-untyped-def]
    pytest.importorskip("triton")
    from gradwire.hooks.numerics import gpu_kernels

    return gpu_kernels


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 7, 16, 32])
def test_factors_are_those_of_lapack(kernels, rank: int) -> None:  # type: ignore[no-untyped-def]
    tall = torch.randn(5, 3 * rank + 2, rank, dtype=torch.float64)
    gram = tall.mT @ tall
    torch.testing.assert_close(kernels.inverse_factors(gram.cuda()).cpu(), inverse_factors(gram), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 4, 32])
def test_columns_are_orthonormal_whatever_the_condition(rank: int) -> None:
    u = torch.linalg.qr(torch.randn(3, 200, rank))[0]
    v = torch.linalg.qr(torch.randn(3, rank, rank))[0]
    matrix = ((u * torch.logspace(0, -5, rank)) @ v.mT).cuda()
    other = torch.randn(2, 77, rank, device="cuda")
    for basis, was in zip(cholesky_qr([matrix, other]), (matrix, other), strict=True):
        torch.testing.assert_close(
            basis.mT @ basis, torch.eye(rank, device="cuda").expand(len(was), -1, -1), atol=1e-4, rtol=0
        )
        torch.testing.assert_close(basis @ (basis.mT @ was), was, atol=1e-4, rtol=0)


def test_zeros_twins_and_nan() -> None:
    """What has no basis gives zeros or noise of at most unit length; what is not finite gives NaN, and only there."""
    column = torch.randn(1, 50, 1)
    same = torch.cat([column, column, torch.zeros(1, 50, 1)], dim=2)
    broken = torch.randn(1, 50, 3)
    broken[0, 7, 1] = float("inf")
    (basis,) = cholesky_qr([torch.cat([torch.zeros(1, 50, 3), same, broken]).cuda()])
    assert not basis[0].any()
    assert basis[1].isfinite().all()
    assert (basis[1].norm(dim=0) < 1.01).all()
    assert basis[2].isnan().all()


def test_directions_are_kept_as_by_torch(kernels) -> None:  # type: ignore[no-untyped-def]
    lengths = [1, 5, 1024, 3000, 7, 2]
    new = [torch.randn(n, device="cuda") for n in lengths]
    new[1].zero_()
    new[4][3], new[5][0] = float("nan"), float("inf")
    new[3].mul_(1e-15)
    old = [torch.randn(n, device="cuda") for n in lengths]
    expected = [t.clone().view(1, -1, 1) for t in old]
    keep_directions([t.view(1, -1, 1) for t in new], expected)
    flat = torch.cat(old)
    kernels.keep_directions(torch.cat(new), flat, torch.tensor([0, *accumulate(lengths)], device="cuda"))
    torch.testing.assert_close(flat, torch.cat([t.view(-1) for t in expected]), rtol=1e-6, atol=1e-7)


def test_many_products_of_one_shape_are_those_of_each() -> None:
    left = [torch.randn(20, 30, device="cuda") for _ in range(9)] + [torch.randn(4, 3, device="cuda")]
    right = [torch.randn(30, 2, device="cuda") for _ in range(9)] + [torch.randn(3, 2, device="cuda")]
    out = [torch.empty(len(a), 2, device="cuda") for a in left]
    multiply(left, right, out)
    for a, b, c in zip(left, right, out, strict=True):
        torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "hook", [power_sgd(2), power_sgd(2, batched=True), chain(error_feedback(), power_sgd(1))], ids=repr
)
def test_hooks_keep_the_laws_on_cuda(hook) -> None:  # type: ignore[no-untyped-def]
    check_hook(hook, device="cuda", world_sizes=(1, 2))

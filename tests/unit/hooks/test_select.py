"""The k largest: against a sort, on distributions that are easy and hard to estimate, compiled and not."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradwire.hooks.numerics import select

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def sorted_way(flat: Tensor, k: int) -> Tensor:
    """By magnitude, NaN first, then by index."""
    keys = [(0 if x != x else 1, -abs(x) if x == x else 0.0, i) for i, x in enumerate(flat.double().tolist())]
    return torch.tensor(sorted(i for _, _, i in sorted(keys)[:k]), dtype=torch.int64)


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        monkeypatch.setattr(select._collect, "compiled", lambda: None)
    elif select._collect.compiled() is None:
        pytest.skip("numba is not installed")


@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -3.5, float("inf"), float("nan")]), max_size=40),
    k=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60)
def test_a_few_elements_with_many_equal(values: list[float], k: int, dtype: torch.dtype) -> None:
    flat = torch.tensor(values, dtype=dtype)
    assert torch.equal(select.largest(flat, k), sorted_way(flat, min(k, len(values))))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "zeros", "few", "steps", "waves", "wild"])
def test_many_elements(kind: str, dtype: torch.dtype) -> None:
    numel = 70_001
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    flat = {
        "normal": normal,
        "zeros": torch.zeros(numel),
        "few": normal * (torch.arange(numel) % 997 == 0),
        "steps": normal.round(),
        "waves": torch.where(
            torch.arange(numel) % 4 == 0, 0.001 * normal, normal
        ),  # a sample at every 4th sees nothing
        "wild": normal.where(torch.arange(numel) % 9000 > 0, torch.tensor(float("nan"))),
    }[kind].to(dtype)
    for k in (1, 70, 700, 40_000):
        got = select.largest(flat, k)
        bits = flat.view(select._BITS[dtype.itemsize]) & torch.iinfo(select._BITS[dtype.itemsize]).max
        expected = torch.sort(bits.long(), descending=True, stable=True).indices[:k].sort().values
        assert torch.equal(got, expected)


@pytest.mark.usefixtures("way")
def test_all_bits_set_is_a_nan_like_others() -> None:
    flat = torch.full((70_000,), -1, dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(select.largest(flat, 3), torch.arange(3))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_reaching_a_bound(dtype: torch.dtype) -> None:
    flat = torch.tensor([0.0, 1.0, -2.0, float("nan"), -0.5, float("-inf"), 2.0] * 10, dtype=dtype)
    got = select.reaching(flat, torch.tensor(2.0, dtype=dtype))
    assert got.tolist() == [i for i in range(70) if i % 7 in (2, 3, 5, 6)]
    assert select.reaching(flat, torch.tensor(0.0, dtype=dtype)).tolist() == [i for i in range(70) if i % 7]
    assert select.reaching(flat[:0], torch.tensor(2.0, dtype=dtype)).tolist() == []

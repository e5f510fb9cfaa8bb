"""scaled_cast: nothing overflows or underflows, and the rounding of the float8 mean is part of `sent`."""

import pytest
import torch

from gradwire import hooks
from gradwire.errors import UsageError
from gradwire.hooks import CommHook, cast, chain, mean, reduce_scatter_mean, scaled_cast, top_k, weighted_mean
from gradwire.hooks.compressors.scaled import power_of_two, scale_for
from gradwire.testing import simulate
from helpers.buckets import bucket, gradients

HALF = chain(scaled_cast(torch.float16), mean())
FLOAT8 = [chain(scaled_cast(dtype), mean()) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]
HOOKS = [HALF, chain(scaled_cast(torch.float16), reduce_scatter_mean()), *FLOAT8]


@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e-6, 1.0, 1e6, 1e38])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_half_keeps_its_precision_at_any_magnitude(size: float, ranks: int) -> None:
    brought = [g.clamp(-3, 3) * size for g in gradients(ranks, 100)]
    truth = torch.stack(brought).double().mean(0)
    for value, _ in simulate(HALF, brought).reduced:
        off = (value.double() - truth).abs().max() / truth.abs().max()
        assert off < 2e-3


def test_half_does_not_overflow_in_the_sum() -> None:
    """Also if an engine adds all ranks' numbers in float16 before it divides."""
    brought = [torch.full((4,), 65504.0)] * 7
    done = simulate(HALF, brought)
    torch.testing.assert_close(done.reduced[0].value, brought[0], rtol=1e-3, atol=0)
    assert [e.op.kind.value for e in done.exchanges] == ["all_reduce", "all_reduce"]
    assert torch.isinf(simulate(chain(cast(torch.float16), mean()), [torch.full((4,), 7e4)] * 2).reduced[0].value).all()


def test_plain_half_is_still_one_collective() -> None:
    assert chain(cast(torch.float16), mean()).collectives == 1
    assert HALF.collectives == 2
    assert chain(scaled_cast(torch.float16), reduce_scatter_mean()).collectives == 3


def test_one_scale_for_all_ranks() -> None:
    done = simulate(HALF, [torch.tensor([2.0**20, 1.0]), torch.tensor([2.0**-10, 1.0])])
    assert done.reduced[0].value.tolist() == [2.0**19, 1.0]
    assert done.wire_bytes == 2 * 1 / 2 * (2 * 2 + 4)


def test_complex_gradients_are_scaled_in_both_parts() -> None:
    for hook in HOOKS:
        done = simulate(hook, [torch.tensor([1 + 2j, 0j]), torch.tensor([3 + 4j, 8 - 8j])])
        assert done.reduced[1].value.tolist() == [2 + 3j, 4 - 4j]
        assert done.wire_bytes == hook.wire_bytes(bucket((2,), dtype=torch.complex64), 2)


@pytest.mark.parametrize("hook", FLOAT8, ids=repr)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_float8_is_as_accurate_as_its_precision(hook: CommHook, size: float) -> None:
    brought = [g * size for g in gradients(3, 1000)]
    truth = torch.stack(brought).double().mean(0)
    value = simulate(hook, brought).reduced[0].value.double()
    digits = 3 if "e4m3" in repr(hook) else 2
    assert (value - truth).norm() / truth.norm() < 2.0 ** -(digits + 0.5)


@pytest.mark.parametrize("hook", FLOAT8, ids=repr)
def test_float8_sends_bytes_twice(hook: CommHook) -> None:
    done = simulate(hook, gradients(3, 100))
    assert [(e.op.kind.value, e.op.dtypes) for e in done.exchanges] == [
        ("all_to_all_single", ("uint8",)),
        ("all_gather_into_tensor", ("uint8",)),
    ]
    assert done.wire_bytes == 2 * 2 * (34 + 4)


@pytest.mark.parametrize("hook", HOOKS, ids=repr)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("numel", [1, 7])
def test_non_finite_values_are_visible(hook: CommHook, bad: float, numel: int) -> None:
    brought = gradients(2, numel)
    brought[1][0] = bad
    assert not torch.isfinite(simulate(hook, brought).reduced[0].value[0])


@pytest.mark.parametrize("hook", HOOKS, ids=repr)
@pytest.mark.parametrize("numel", [0, 1])
def test_buckets_of_zero_and_one_elements(hook: CommHook, numel: int) -> None:
    assert simulate(hook, [torch.full((numel,), 2.0)] * 3).reduced[0].value.tolist() == [2.0] * numel
    assert simulate(hook, [torch.zeros(numel)] * 3).reduced[0].value.tolist() == [0.0] * numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_are_powers_of_two(dtype: torch.dtype) -> None:
    exponents = torch.arange(-200, 200)
    limit = 126 if dtype == torch.float32 else 1022
    expected = [2.0 ** max(-limit, min(limit, e)) for e in exponents.tolist()]
    assert power_of_two(exponents, dtype).tolist() == expected
    assert power_of_two(-exponents, dtype).reciprocal().tolist() == expected
    bad = torch.tensor([float("nan"), float("inf")], dtype=dtype)
    assert scale_for(bad, 15).tolist() == [1.0, 1.0]
    for magnitude in (1e-30, 0.5, 1.0, 3.0, 1e30):
        scaled = magnitude * scale_for(torch.tensor([magnitude], dtype=dtype), 15).item()
        assert 2**13 < scaled <= 2**15


def test_refused_when_built() -> None:
    with pytest.raises(UsageError, match=r"use cast\(torch.bfloat16\)"):
        scaled_cast(torch.bfloat16)
    with pytest.raises(UsageError, match=r"Use scaled_cast\(torch.float8_e5m2\)"):
        cast(torch.float8_e5m2)
    for inner in (weighted_mean(), top_k(k=1), chain(hooks.error_feedback(), mean())):
        with pytest.raises(UsageError, match=r"may overflow otherwise. Put mean\(\)"):
            chain(scaled_cast(torch.float16), inner)
    for inner in (weighted_mean(), top_k(k=1), reduce_scatter_mean(), chain(hooks.error_feedback(), mean())):
        with pytest.raises(UsageError, match=r"not summed by an engine.*Put mean\(\) inside"):
            chain(scaled_cast(torch.float8_e4m3fn), inner)

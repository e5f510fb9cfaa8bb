"""mean, weighted_mean, cast, and chain: values against arithmetic on simulated ranks, errors when they are built."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradwire import hooks
from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks import BucketSpec, Reduced, Reduction, Turn, cast, chain, mean, reduce_scatter_mean, weighted_mean
from gradwire.testing import simulate
from helpers.buckets import bucket, gradients

NARROW = [torch.bfloat16, torch.float16]


def average(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean(0)


@given(ranks=st.integers(1, 5), numel=st.sampled_from([0, 1, 3, 17]), donated=st.booleans())
@settings(max_examples=40)
def test_mean_is_the_mean_on_every_rank(ranks: int, numel: int, donated: bool) -> None:
    brought = gradients(ranks, numel)
    done = simulate(mean(), brought, donated=donated)
    for value, _ in done.reduced:
        torch.testing.assert_close(value, average(brought))
        assert torch.equal(value, done.reduced[0].value)
    assert done.nbytes == 4 * numel


def test_mean_divides_by_those_who_still_have_inputs() -> None:
    brought = [torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([0.0])]
    for donated in (False, True):
        done = simulate(mean(), brought, divisor=2, donated=donated)
        assert [value.item() for value, _ in done.reduced] == [3.0, 3.0, 3.0]


def test_mean_of_complex_and_of_sparse_gradients() -> None:
    done = simulate(mean(), [torch.tensor([1 + 1j]), torch.tensor([3 - 1j])])
    assert done.reduced[1].value.item() == 2
    rows = [torch.eye(3)[:, :2].mul(rank + 1).to_sparse(1) for rank in range(2)]
    done = simulate(mean(), rows)
    assert torch.equal(done.reduced[0].value.to_dense(), torch.eye(3)[:, :2] * 1.5)


@pytest.mark.parametrize("numel", [0, 1, 6, 7])
@pytest.mark.parametrize("donated", [False, True])
def test_reduce_scatter_mean_is_the_mean_in_two_halves(numel: int, donated: bool) -> None:
    brought = gradients(3, numel)
    done = simulate(reduce_scatter_mean(), brought, donated=donated)
    for value, _ in done.reduced:
        torch.testing.assert_close(value, average(brought))
    assert [e.op.kind.value for e in done.exchanges] == ["reduce_scatter_tensor", "all_gather_into_tensor"]
    assert done.wire_bytes == 2 * 2 * -(-numel // 3) * 4


@given(weights=st.lists(st.integers(0, 7), min_size=1, max_size=4), donated=st.booleans())
@settings(max_examples=40)
def test_weighted_mean_weights_each_rank(weights: list[int], donated: bool) -> None:
    brought = gradients(len(weights), 6, torch.float64)
    done = simulate(weighted_mean(), brought, weights=[float(w) for w in weights], donated=donated)
    total = sum(weights)
    expected = sum(w * g for w, g in zip(weights, brought, strict=True)) / total if total else torch.zeros(6).double()
    for value, _ in done.reduced:
        torch.testing.assert_close(value, expected)
        assert torch.equal(value, done.reduced[0].value)
    torch.testing.assert_close(average([sent for _, sent in done.reduced]), expected)


def test_the_sum_of_weights_does_not_overflow_in_float16() -> None:
    brought = [torch.tensor([3.0, 100.0], dtype=torch.float16), torch.tensor([1.0, 200.0], dtype=torch.float16)]
    done = simulate(weighted_mean(), brought, weights=[40000.0, 40000.0])
    assert done.reduced[0].value.tolist() == [2.0, 150.0]
    assert [sent.tolist() for _, sent in done.reduced] == [g.tolist() for g in brought]
    assert done.reduced[0].value.dtype == torch.float16
    assert len(done.exchanges) == 1


def test_weighted_mean_refuses_bad_weights() -> None:
    with pytest.raises(UsageError, match=r"rank 0: weight -1\.0 is no count"):
        simulate(weighted_mean(), [torch.ones(1)], weights=[-1.0])
    with pytest.raises(UsageError, match=r"rank 0: weight nan"):
        simulate(weighted_mean(), [torch.ones(1)], weights=[float("nan")])


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("donated", [False, True])
def test_cast_reduces_in_the_narrow_dtype(dtype: torch.dtype, donated: bool) -> None:
    brought = gradients(3, 11)
    done = simulate(chain(cast(dtype), mean()), brought, donated=donated)
    expected = average([g.to(dtype).float() for g in brought]).to(dtype).float()
    for value, _ in done.reduced:
        assert value.dtype == torch.float32
        assert torch.equal(value, expected)
    assert done.exchanges[0].op.dtypes == (str(dtype).removeprefix("torch."),)
    assert done.nbytes == 2 * 11


def test_cast_leaves_complex_gradients_as_they_are() -> None:
    """A narrow real dtype would silently drop their imaginary part."""
    done = simulate(chain(cast(torch.bfloat16), mean()), [torch.tensor([1 + 2j]), torch.tensor([3 + 4j])])
    assert done.reduced[0].value.item() == 2 + 3j


class Remembers(hooks.CommHook):
    """Shows which bucket its state was made for."""

    def init(self, spec: BucketSpec) -> torch.dtype:
        return spec.dtype

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        assert grad.dtype == state == turn.spec.dtype
        return Reduced(grad, grad)
        yield

    def save(self, state: Any, spec: BucketSpec) -> dict[str, Any]:
        return dict.fromkeys(spec.names, spec.dtype)

    def load(self, saved: Any, spec: BucketSpec) -> torch.dtype:
        assert set(saved.values()) == {spec.dtype}
        return spec.dtype


def test_the_hook_inside_a_cast_sees_the_narrow_dtype() -> None:
    hook = chain(cast(torch.bfloat16), Remembers())
    spec = bucket((3,))
    done = simulate(hook, [torch.zeros(3)], spec=spec)
    saved = hook.save(done.states[0], spec)
    assert saved == {"p0": torch.bfloat16}
    assert hook.load(saved, spec) == torch.bfloat16


def test_a_cast_has_the_collectives_of_its_inner_hook() -> None:
    assert chain(cast(torch.bfloat16), mean()).collectives == 1
    assert chain(cast(torch.bfloat16), Remembers()).collectives is None


def test_chain_puts_the_left_one_outermost() -> None:
    assert repr(chain(cast(torch.float16), cast(torch.bfloat16), mean())) == (
        "cast(torch.float16) > cast(torch.bfloat16) > mean()"
    )
    assert chain(mean()) == mean()
    assert (
        chain(cast(torch.bfloat16), mean()) == chain(cast(torch.bfloat16), mean()) != chain(cast(torch.float16), mean())
    )
    assert hash(mean()) == hash(mean())


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ((), UsageError, "chain.. without arguments"),
        ((cast(torch.bfloat16),), UsageTypeError, "the last part.* is a stage"),
        ((mean(), cast(torch.bfloat16)), UsageTypeError, "is a stage"),
        ((mean,), UsageTypeError, "a function that was not called"),
        ((mean(), mean()), UsageTypeError, r"mean\(\) communicates by itself"),
        ((3, mean()), UsageTypeError, "3 is not a stage"),
        ((lambda hook: None, mean()), UsageTypeError, "returned None, not a CommHook"),
    ],
)
def test_chain_refuses_at_once(parts: tuple[Any, ...], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        chain(*parts)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.bool, "bfloat16"])
def test_cast_refuses_what_is_not_floating_point(dtype: Any) -> None:
    with pytest.raises(UsageError, match="not a floating-point dtype"):
        cast(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counts_of_samples_are_not_rounded(dtype: torch.dtype) -> None:
    """257 is 256 in bfloat16, and float16 rounds the sum of two such counts."""
    done = simulate(
        weighted_mean(), [torch.full((1,), 1.0, dtype=dtype), torch.zeros(1, dtype=dtype)], weights=[1.0, 257.0]
    )
    assert done.reduced[0].value == torch.tensor([1 / 258]).to(dtype)
    done = simulate(weighted_mean(), [torch.full((3,), 2.0, dtype=dtype)] * 3, weights=[259.0, 261.0, 40000.0])
    assert done.reduced[0].value.tolist() == [2.0] * 3

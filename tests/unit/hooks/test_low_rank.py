"""power_sgd: against a plain version of the paper's algorithm, what is sent, what is kept, what fails."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.hooks import BucketSpec, CommHook, Reduced, Reduction, Turn, chain, error_feedback, mean, power_sgd
from gradwire.hooks.numerics.orthogonal import cholesky_qr, multiply, orthonormal
from gradwire.testing import simulate
from helpers.buckets import bucket, gradients, steps


def plainly(ms: list[Tensor], q: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Algorithm 1 of the paper on the matrices of all ranks: the value, the next Q, and what each rank sent."""
    p = torch.linalg.qr(torch.stack([m @ q for m in ms]).mean(0))[0]
    qs = [m.T @ p for m in ms]
    q = torch.stack(qs).mean(0)
    return p @ q.T, q, [p @ each.T for each in qs]


@pytest.mark.parametrize("donated", [False, True])
def test_it_is_the_papers_algorithm(donated: bool) -> None:
    hook, spec, rank = power_sgd(2, min_compression=1), bucket((12, 10), dtype=torch.float64), 2
    states: Any = [hook.init(spec) for _ in range(3)]
    q = hook.save(states[0], spec)["p0"]
    assert q.shape == (10, rank)
    for step in range(4):
        brought = gradients(3, 120, torch.float64, seed=step)
        done = simulate(hook, brought, spec=spec, states=states, step=step, donated=donated)
        value, q, sent = plainly([g.view(12, 10) for g in brought], q)
        torch.testing.assert_close(done.reduced[0].value.view(12, 10), value)
        if not donated:
            for reduced, expected in zip(done.reduced, sent, strict=True):
                torch.testing.assert_close(reduced.sent.view(12, 10), expected)


def test_a_matrix_of_that_rank_is_exact() -> None:
    spec = bucket((20, 30))
    left, right = torch.randn(20, 2), torch.randn(2, 30)
    brought = [(left * (r + 1)) @ right for r in range(2)]
    hook = power_sgd(2)
    (reduced, _) = simulate(hook, [m.flatten() for m in brought], spec=spec).reduced
    torch.testing.assert_close(reduced.value.view(20, 30), (brought[0] + brought[1]) / 2, rtol=1e-4, atol=1e-4)


def test_warm_starts_find_the_largest_directions() -> None:
    spec = bucket((30, 30), dtype=torch.float64)
    u, s, v = torch.linalg.svd(torch.randn(30, 30, dtype=torch.float64))
    matrix = (u * s) @ v
    best = (u[:, :3] * s[:3]) @ v[:3]
    done = steps(power_sgd(3), lambda step: [matrix.flatten()], 60, spec=spec)
    off = [float((one.reduced[0].value.view(30, 30) - matrix).norm()) for one in done]
    assert off[-1] < off[0]
    assert off[-1] <= float((best - matrix).norm()) * 1.05


def test_vectors_and_small_matrices_are_sent_uncompressed() -> None:
    spec = bucket((16, 8), (7,), (2, 3), ())
    brought = gradients(2, 128 + 7 + 6 + 1)
    done = simulate(power_sgd(1), brought, spec=spec)
    expected = (brought[0] + brought[1]) / 2
    assert torch.equal(done.reduced[0].value[128:], expected[128:])
    assert not torch.allclose(done.reduced[0].value[:128], expected[:128])
    assert [e.op.shapes for e in done.exchanges] == [((14 + 16,),), ((8,),)]
    assert done.wire_bytes == power_sgd(1).wire_bytes(spec, 2) == 4 * (14 + 16 + 8)


def test_a_bucket_without_a_matrix_is_one_plain_mean() -> None:
    spec = bucket((7,), (2, 3))
    brought = gradients(2, 13)
    for hook in (power_sgd(2), power_sgd(4, batched=True)):
        done = simulate(hook, brought, spec=spec)
        assert torch.equal(done.reduced[0].value, simulate(mean(), brought, spec=spec).reduced[0].value)
        assert len(done.exchanges) == 1


def test_min_compression_decides_what_is_a_matrix() -> None:
    spec = bucket((10, 10))  # rank 2: 40 numbers instead of 100
    assert power_sgd(2, min_compression=2).wire_bytes(spec, 2) == 4 * 40
    assert power_sgd(2, min_compression=2.5).wire_bytes(spec, 2) == 4 * 100


def test_batched_is_one_padded_square() -> None:
    spec = bucket((7, 9), (50,))
    hook = power_sgd(2, batched=True)
    done = simulate(hook, gradients(2, 113), spec=spec)
    assert [e.op.shapes for e in done.exchanges] == [((22,),), ((22,),)]  # 11 x 11
    assert done.reduced[0].value.shape == (113,)


def test_strides_are_followed() -> None:
    """Rows are contiguous in memory, also those of a channels_last or transposed parameter."""
    last = tuple(torch.empty((16, 4, 2, 2), device="meta").to(memory_format=torch.channels_last).stride())
    spec = BucketSpec(
        0, ("last", "turned"), ((16, 4, 2, 2), (16, 40)), (last, (1, 16)), torch.float32, torch.device("cpu")
    )
    saved = power_sgd(1).save(power_sgd(1).init(spec), spec)
    assert {name: tuple(q.shape) for name, q in saved.items()} == {"last": (16, 1), "turned": (16, 1)}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_gradients_are_pairs(dtype: torch.dtype) -> None:
    spec = bucket((12, 6), (3,), dtype=dtype)
    brought = [torch.randn(75, dtype=dtype) for _ in range(2)]
    for hook in (power_sgd(1), power_sgd(1, batched=True)):
        for donated in (False, True):
            done = simulate(hook, brought, spec=spec, donated=donated)
            assert done.reduced[0].value.dtype == dtype
            assert done.wire_bytes == hook.wire_bytes(spec, 2)
            if not donated:
                sent = torch.stack([s for _, s in done.reduced]).mean(0)
                torch.testing.assert_close(done.reduced[0].value, sent)


def test_all_ranks_and_all_buckets_start_with_the_same_q() -> None:
    one = power_sgd(2).save(power_sgd(2).init(bucket((20, 30), (30, 30), names=("a", "b"))), bucket())
    other = power_sgd(2).save(power_sgd(2).init(bucket((30, 30), (9,), names=("b", "c"))), bucket())
    assert torch.equal(one["b"], other["b"])
    assert not torch.equal(one["a"], one["b"])
    again = power_sgd(2, seed=1).save(power_sgd(2, seed=1).init(bucket((30, 30), names=("b",))), bucket())
    assert not torch.equal(one["b"], again["b"])


def test_a_parameter_of_another_shape_starts_fresh() -> None:
    hook = power_sgd(2)
    saved = hook.save(hook.init(bucket((20, 30))), bucket((20, 30)))
    loaded = hook.save(hook.load(saved, bucket((20, 40))), bucket((20, 40)))
    assert torch.equal(loaded["p0"], hook.save(hook.init(bucket((20, 40))), bucket())["p0"])


def test_batched_state_is_for_the_same_bucket_only() -> None:
    hook, spec = power_sgd(1, batched=True), bucket((20, 30), (7,))
    states = simulate(hook, gradients(1, 607), spec=spec).states
    saved = hook.save(states[0], spec)
    assert torch.equal(hook.load(saved, spec).q.flat, states[0].q.flat)
    turned = bucket((7,), (20, 30), names=("p1", "p0"))
    assert torch.equal(hook.load(saved, turned).q.flat, hook.init(turned).q.flat)
    # A bucket that was not reduced since saves what it loaded; one that was, its own state.
    fresh = hook.load(saved, turned)
    assert hook.save(fresh, turned) == saved
    simulate(hook, gradients(1, 607), spec=turned, states=[fresh])
    assert list(hook.save(fresh, turned)) == ["p1"]


def test_without_a_warm_start_nothing_is_kept_and_every_step_draws_new_numbers() -> None:
    hook, spec = power_sgd(1, warm_start=False), bucket((20, 30))
    brought = gradients(2, 600)
    values = [simulate(hook, brought, spec=spec, step=step).reduced[0].value for step in (0, 1, 0)]
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[1])
    assert hook.save(hook.init(spec), spec) == {}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_visible_and_not_kept(batched: bool, bad: float) -> None:
    hook, spec = power_sgd(2, batched=batched), bucket((20, 30), (30, 20))
    brought = gradients(2, 1200)
    brought[1][3] = bad
    done = simulate(hook, brought, spec=spec)
    assert not done.reduced[0].value[3].isfinite()
    if not batched:
        assert done.reduced[0].value[600:].isfinite().all()
    done = simulate(hook, gradients(2, 1200), spec=spec, states=done.states, step=1)
    assert done.reduced[0].value.isfinite().all()
    assert done.reduced[0].value.abs().sum() > 0


def test_zeros_do_not_persist() -> None:
    hook, spec = power_sgd(2), bucket((20, 30))
    done = simulate(hook, [torch.zeros(600)] * 2, spec=spec)
    assert not done.reduced[0].value.any()
    done = simulate(hook, gradients(2, 600), spec=spec, states=done.states, step=1)
    assert done.reduced[0].value.any()
    # A gradient of rank 1 leaves the second column unchanged; it is used again at a higher rank.
    thin = torch.outer(torch.randn(20), torch.randn(30)).flatten()
    states = simulate(hook, [thin], spec=spec).states
    value = simulate(hook, gradients(1, 600), spec=spec, states=states, step=1).reduced[0].value
    assert torch.linalg.matrix_rank(value.view(20, 30), rtol=1e-4) == 2


def test_tiny_gradients_of_a_narrow_dtype_do_not_vanish() -> None:
    hook, spec = power_sgd(1), bucket((20, 30), dtype=torch.bfloat16)
    brought = [g * 1e-20 for g in gradients(2, 600, torch.bfloat16)]
    assert list(steps(hook, lambda step: brought, 5, spec=spec))[-1].reduced[0].value.any()


@pytest.mark.parametrize("rank", [1, 2, 4, 32])
@pytest.mark.parametrize("way", [orthonormal, cholesky_qr])
def test_columns_are_orthonormal_for_any_condition_number(way: Any, rank: int) -> None:
    u = torch.linalg.qr(torch.randn(3, 200, rank))[0]
    v = torch.linalg.qr(torch.randn(3, rank, rank))[0]
    matrix = (u * torch.logspace(0, -5, rank)) @ v.mT
    (basis,) = way([matrix.clone()])
    torch.testing.assert_close(basis.mT @ basis, torch.eye(rank).expand(3, -1, -1), atol=1e-4, rtol=0)
    # It spans the same space: the projection of the matrix onto its complement is zero.
    torch.testing.assert_close(basis @ (basis.mT @ matrix), matrix, atol=1e-5, rtol=0)


def test_linearly_dependent_columns_do_not_blow_up() -> None:
    column = torch.randn(2, 50, 1)
    same = torch.cat([column, column, torch.zeros(2, 50, 1)], dim=2)
    for way in (orthonormal, cholesky_qr):
        (basis,) = way([same.clone()])
        assert basis.isfinite().all()
        assert (basis.norm(dim=1) < 1.01).all()
        assert not cholesky_qr([torch.zeros(1, 5, 2)])[0].any()


def test_products_of_any_strides() -> None:
    for inner in (1, 3):
        a, b = torch.randn(4, inner), torch.randn(inner, 5)
        for out in (torch.empty(4, 5), torch.empty(5, 4).mT):
            multiply([a], [b], [out])
            torch.testing.assert_close(out, a @ b)


class Passing(CommHook):
    """Returns the tensor it was given."""

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return Reduced(grad, grad)
        yield


def test_error_feedback_returns_no_view_of_its_residual() -> None:
    hook = chain(error_feedback(), Passing())
    done = simulate(hook, [torch.ones(3)])
    assert done.reduced[0].value.tolist() == done.reduced[0].sent.tolist() == [1.0] * 3
    assert done.states[0]["residual"].tolist() == [0.0] * 3

"""Deep Gradient Compression against a naive reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks import CommHook, chain, dgc, error_feedback, mean
from gradwire.testing import check_hook, simulate
from helpers.laws import laws_in

HOOKS = [dgc(0.1), dgc(0.01, momentum=0.5, warmup_steps=3, clip=1.0, values=torch.bfloat16), dgc(0.5, warmup_steps=2)]


def gradients(ranks: int, numel: int, step: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(numel, generator=generator) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("hook", HOOKS, ids=repr)
def test_laws(hook: CommHook, dtype: torch.dtype) -> None:
    check_hook(hook, dtype=dtype, laws=laws_in(dtype))


def test_as_in_the_paper() -> None:
    ranks, numel, k = 2, 40, 4
    u, v = [torch.zeros(numel) for _ in range(ranks)], [torch.zeros(numel) for _ in range(ranks)]
    states: Any = None
    for step in range(5):
        brought = gradients(ranks, numel, step)
        expected = torch.zeros(numel)
        for r, g in enumerate(brought):
            u[r] = 0.9 * u[r] + g
            v[r] = v[r] + u[r]
            mask = v[r].abs() >= v[r].abs().sort(descending=True).values[k - 1]
            expected += v[r] * mask / ranks
            v[r], u[r] = v[r] * ~mask, u[r] * ~mask
        done = simulate(dgc(0.1), brought, states=states, step=step)
        states = done.states
        torch.testing.assert_close(done.reduced[0].value, expected)


def test_nothing_is_lost() -> None:
    """Without momentum, what was sent and what is left make up all gradients, rounding of values included."""
    hook = dgc(0.1, momentum=0.0, values=torch.bfloat16)
    states: Any = None
    sent, brought = torch.zeros(50), torch.zeros(50)
    for step in range(20):
        (g,) = gradients(1, 50, step)
        done = simulate(hook, [g], states=states, step=step)
        states = done.states
        sent += done.reduced[0].sent
        brought += g
    torch.testing.assert_close(sent + states[0].unsent, brought, atol=1e-5, rtol=0)


def test_the_warm_up_decreases_by_the_same_factor() -> None:
    hook: Any = dgc(0.25 / 16, warmup_steps=4)
    assert [hook.ratio_at(step) for step in range(6)] == pytest.approx([0.25 / 2**s for s in range(5)] + [0.25 / 16])
    done = simulate(hook, gradients(2, 64), step=1)
    assert done.wire_bytes == 8 * 8
    assert [HOOKS[2].ratio_at(s) for s in range(3)] == [0.5] * 3  # type: ignore[attr-defined]


def test_each_rank_clips_to_its_part_of_the_norm() -> None:
    hook = dgc(1.0, momentum=0.0, clip=1.0)
    done = simulate(hook, [torch.full((4,), 10.0)] * 4)
    torch.testing.assert_close(done.reduced[0].sent.norm(), torch.tensor(0.5))
    small = simulate(hook, [torch.full((4,), 0.01)] * 4)
    assert torch.equal(small.reduced[0].sent, torch.full((4,), 0.01))
    assert torch.isfinite(simulate(hook, [torch.zeros(4)] * 2).reduced[0].value).all()


def test_complex_and_nan() -> None:
    done = simulate(dgc(0.5), [torch.tensor([1 + 9j, 5 + 2j])])
    assert done.reduced[0].value.tolist() == [9j, 5]
    assert torch.isnan(simulate(dgc(0.1), [torch.tensor([1.0, float("nan")])]).reduced[0].value[1])
    assert simulate(dgc(0.1), [torch.zeros(0)] * 2).reduced[0].value.numel() == 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: dgc(0.0), "not a part of the whole"),
        (lambda: dgc(0.1, momentum=1.0), "velocities grow without bound"),
        (lambda: dgc(0.1, warmup_steps=-1), "warmup_steps is negative"),
        (lambda: dgc(0.1, clip=0.0), "clip is a norm"),
        (lambda: dgc(0.1, values=torch.int8), "not a dtype that values can be sent in"),
        (lambda: chain(error_feedback(), dgc(0.1)), "already keeps what it did not send"),
    ],
)
def test_refused_when_built(build: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()


def test_it_cannot_be_a_stage() -> None:
    with pytest.raises(UsageTypeError, match="an all-reduce needs every element"):
        chain(dgc(0.1), mean())


def test_repr() -> None:
    assert repr(dgc(0.1)) == "dgc(ratio=0.1, momentum=0.9, warmup_steps=0, clip=None, values=None)"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_sent_once_and_not_kept(bad: float) -> None:
    hook = dgc(0.25)
    first = simulate(hook, [torch.tensor([bad, bad, 1.0, 2.0])])
    assert not first.reduced[0].value[0].isfinite()
    states: Any = first.states
    for step in range(1, 5):
        done = simulate(hook, [torch.ones(4)], states=states, step=step)
        states = done.states
        assert done.reduced[0].value.isfinite().all()

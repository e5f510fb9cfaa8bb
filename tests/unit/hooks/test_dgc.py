"""Deep Gradient Compression against a naive reference."""

from typing import Any

import pytest
import torch

from gradwire.hooks import dgc
from gradwire.testing import simulate
from helpers.buckets import gradients, steps


def test_as_in_the_paper() -> None:
    ranks, numel, k = 2, 40, 4
    u, v = [torch.zeros(numel) for _ in range(ranks)], [torch.zeros(numel) for _ in range(ranks)]
    done: Any = None
    for step in range(5):
        brought = gradients(ranks, numel, seed=step)
        expected = torch.zeros(numel)
        for r, g in enumerate(brought):
            u[r] = 0.9 * u[r] + g
            v[r] = v[r] + u[r]
            mask = v[r].abs() >= v[r].abs().sort(descending=True).values[k - 1]
            expected += v[r] * mask / ranks
            v[r], u[r] = v[r] * ~mask, u[r] * ~mask
        done = simulate(dgc(0.1), brought, states=done and done.states, step=step)
        torch.testing.assert_close(done.reduced[0].value, expected)


def test_nothing_is_lost() -> None:
    """Without momentum, what was sent and what is left make up all gradients, rounding of values included."""
    hook = dgc(0.1, momentum=0.0, values=torch.bfloat16)
    brought = [gradients(1, 50, seed=step) for step in range(20)]
    done = list(steps(hook, brought.__getitem__, 20))
    sent = sum(one.reduced[0].sent for one in done)
    torch.testing.assert_close(sent + done[-1].states[0]["unsent"], sum(g for (g,) in brought), atol=1e-5, rtol=0)


def test_the_warm_up_decreases_by_the_same_factor() -> None:
    hook: Any = dgc(0.25 / 16, warmup_steps=4)
    assert [hook.ratio_at(step) for step in range(6)] == pytest.approx([0.25 / 2**s for s in range(5)] + [0.25 / 16])
    done = simulate(hook, gradients(2, 64), step=1)
    assert done.wire_bytes == 8 * 8
    assert [dgc(0.5, warmup_steps=2).ratio_at(s) for s in range(3)] == [0.5] * 3  # type: ignore[attr-defined]


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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_sent_once_and_not_kept(bad: float) -> None:
    hook = dgc(0.25)
    brought = [torch.tensor([bad, bad, 1.0, 2.0]), *[torch.ones(4)] * 4]
    first, *later = steps(hook, lambda step: [brought[step]], 5)
    assert not first.reduced[0].value[0].isfinite()
    assert all(done.reduced[0].value.isfinite().all() for done in later)

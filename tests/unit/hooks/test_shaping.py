"""clip and add_noise: applied before the gradient is sent, and never fed back."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.errors import UsageError
from gradwire.groups import Group
from gradwire.hooks import CommHook, Trait, add_noise, cast, chain, clip, dgc, error_feedback, mean, random_k
from gradwire.parallel import DistributedDataParallel
from gradwire.testing import run_ranks, simulate
from helpers.buckets import bucket

SPEC = bucket((2,), (2,))


@pytest.mark.parametrize("donated", [False, True])
def test_clip_by_the_norm_of_each_parameter(donated: bool) -> None:
    brought = [torch.tensor([3.0, 4.0, 0.3, 0.4])]
    done = simulate(chain(clip(norm=1.0), mean()), brought, spec=SPEC, donated=donated)
    torch.testing.assert_close(done.reduced[0].value, torch.tensor([0.6, 0.8, 0.3, 0.4]))


def test_clip_by_the_norm_of_complex_parameters() -> None:
    spec = replace(SPEC, dtype=torch.complex64)
    done = simulate(chain(clip(norm=1.0), mean()), [torch.tensor([3.0, 4j, 0.3, 0.4j])], spec=spec)
    torch.testing.assert_close(done.reduced[0].value, torch.tensor([0.6, 0.8j, 0.3, 0.4j]))


@pytest.mark.parametrize("hook", [chain(clip(norm=1.0), mean()), dgc(1.0, momentum=0.0, clip=1.0)], ids=repr)
def test_clipping_does_not_depend_on_buckets(hook: CommHook) -> None:
    """The first step has one bucket, later ones have several."""

    def rank_main(group: Group) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
        ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.0002)
        ddp.set_hook(hook)
        averages = []
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(2, 8)).pow(2).sum().mul(100).backward()
            averages.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        assert len(ddp.replica.reducer.layout.buckets) > 1
        ddp.replica.detach()
        return averages

    for first, *later in run_ranks(rank_main, 1, kind="threads"):
        for average in later:
            torch.testing.assert_close(average, first)


def test_two_noise_stages_draw_different_noise() -> None:
    brought = [torch.zeros(4000)]
    once = simulate(chain(add_noise(std=1.0), mean()), brought).reduced[0].value
    twice = simulate(chain(add_noise(std=1.0), add_noise(std=1.0), mean()), brought).reduced[0].value
    assert abs(float((twice - once).std()) - 1.0) < 0.1
    assert abs(float(torch.corrcoef(torch.stack([once, twice - once]))[0, 1])) < 0.1


def test_clip_by_value() -> None:
    done = simulate(chain(clip(value=1.0), mean()), [torch.tensor([3.0, -4.0, 0.5])])
    assert done.reduced[0].value.tolist() == [1.0, -1.0, 0.5]
    done = simulate(chain(clip(value=1.0), mean()), [torch.tensor([3 - 4j, 0.5j])])
    assert done.reduced[0].value.tolist() == [1 - 1j, 0.5j]


def test_large_half_gradients_have_a_norm() -> None:
    brought = [torch.full((4,), 6e4, dtype=torch.float16)]
    value = simulate(chain(clip(norm=1.0), mean()), brought).reduced[0].value
    torch.testing.assert_close(value, torch.full((4,), 0.5, dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_noise_differs_on_every_rank_and_step(dtype: torch.dtype) -> None:
    hook = chain(add_noise(std=2.0, seed=1), mean())
    brought = [torch.ones(4000, dtype=dtype)] * 2
    done = simulate(hook, brought)
    noise = [sent - 1 for _, sent in done.reduced]
    assert not torch.equal(noise[0], noise[1])
    for n in noise:
        flat = (torch.view_as_real(n) if dtype.is_complex else n).double()
        assert abs(float(flat.mean())) < 0.15
        assert abs(float(flat.std()) - 2.0) < 0.1
    again, later = simulate(hook, brought), simulate(hook, brought, step=1)
    assert torch.equal(done.reduced[0].value, again.reduced[0].value)
    assert not torch.equal(done.reduced[0].value, later.reduced[0].value)
    other = simulate(chain(add_noise(std=2.0, seed=2), mean()), brought)
    assert not torch.equal(done.reduced[0].value, other.reduced[0].value)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: clip(), "Pass one of norm and value"),
        (lambda: clip(norm=1.0, value=1.0), "Pass one of norm and value"),
        (lambda: chain(random_k(0.5), cast(torch.bfloat16), clip(norm=1.0), mean()), "to the left of random_k"),
        (lambda: chain(error_feedback(), clip(norm=1.0), mean()), "changes gradients on purpose"),
        (lambda: chain(error_feedback(), add_noise(std=1.0), mean()), "changes gradients on purpose"),
    ],
)
def test_refused_when_built(build: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()


def test_repr_and_traits() -> None:
    hook = chain(clip(norm=1.0), add_noise(std=0.5, seed=4), mean())
    assert Trait.DISTORTS in hook.traits
    assert Trait.DISTORTS not in mean().traits
    assert hook.collectives == 1


@pytest.mark.parametrize(
    ("dtype", "huge"), [(torch.float32, 1e25), (torch.bfloat16, 1e25), (torch.float64, 1e300), (torch.float64, 0.0)]
)
def test_huge_gradients_are_clipped_and_not_lost(dtype: torch.dtype, huge: float) -> None:
    grad = torch.tensor([3 * huge, 4 * huge], dtype=dtype)
    expected = torch.tensor([0.6, 0.8] if huge else [0.0, 0.0], dtype=dtype)
    for hook in (chain(clip(norm=1.0), mean()), dgc(1.0, momentum=0.0, clip=1.0)):
        torch.testing.assert_close(simulate(hook, [grad]).reduced[0].value, expected)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_clipped_by_norm_a_parameter_with_a_non_finite_element_becomes_nan(bad: float) -> None:
    for dtype in (torch.float32, torch.float64):
        grad = torch.tensor([bad, 1.0], dtype=dtype)
        assert simulate(chain(clip(norm=1.0), mean()), [grad]).reduced[0].value.isnan().all()

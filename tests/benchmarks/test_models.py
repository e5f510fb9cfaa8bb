"""The models that benchmarks train."""

from __future__ import annotations

import pytest
import torch

from benchmarks.models import GPT2, SIZES, ManySmall


@pytest.mark.parametrize("count", [1, 2, 7, 400])
def test_many_small_parameters_are_as_many_as_asked_for(count):
    model = ManySmall(count)
    assert len(list(model.parameters())) == count
    model(ManySmall.batch(4)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_shape_of_gpt2():
    with torch.device("meta"):
        model = GPT2(SIZES["small"])
    assert sum(p.numel() for p in model.parameters()) == 124_439_808  # as published, with tied embeddings
    assert len(list(model.parameters())) == 148
    assert model.head.weight is model.symbol.weight


def test_it_gives_the_loss_of_a_guess_at_first():
    torch.manual_seed(0)
    model = GPT2(SIZES["tiny"])
    loss = model(model.batch(2))
    assert loss.item() == pytest.approx(torch.tensor(101.0).log().item(), rel=0.05)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_it_sees_no_future():
    torch.manual_seed(0)
    model = GPT2(SIZES["tiny"])
    x = torch.randn(1, 16, 32)
    later = x.clone()
    later[:, 8:] += 1.0
    a, b = (model.blocks[1](model.blocks[0](y)) for y in (x, later))
    assert torch.equal(a[:, :8], b[:, :8])
    assert not torch.equal(a[:, 8:], b[:, 8:])

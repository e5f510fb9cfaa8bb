"""What one rank does: a model that cannot cheat, and fingerprints that see a single bit."""

import torch

from gradwire.cli.demo.model import SIZES, Transformer
from gradwire.cli.demo.train import fingerprints
from gradwire.testing import run_ranks


def test_a_fingerprint_sees_a_single_bit():
    def rank(group):
        tensors = [torch.ones(4), torch.zeros(2, 3).t()]
        alike = fingerprints(group, tensors)
        if group.rank == 1:
            tensors[1][0, 0] = -0.0  # equal as a number, another bit pattern
        return alike, fingerprints(group, tensors)

    for alike, apart in run_ranks(rank, 3):
        assert len(set(alike)) == 1
        assert apart[0] == apart[2] == alike[0]
        assert apart[1] != alike[1]


def test_the_model_cannot_see_the_future():
    model = Transformer(SIZES["tiny"], 10, torch.Generator().manual_seed(0))
    symbols = torch.arange(8)[None] % 10
    changed = symbols.clone()
    changed[0, 5:] = 9
    torch.testing.assert_close(model(symbols)[0, :5], model(changed)[0, :5])
    assert not torch.equal(model(symbols)[0, 5:], model(changed)[0, 5:])


def test_weights_come_from_the_generator_alone():
    def draw(seed):
        return [
            p.detach().clone() for p in Transformer(SIZES["tiny"], 10, torch.Generator().manual_seed(seed)).parameters()
        ]

    assert all(map(torch.equal, draw(1), draw(1)))
    assert not all(map(torch.equal, draw(1), draw(2)))

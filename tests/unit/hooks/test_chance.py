"""Generators seeded by step, bucket and rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire.hooks import BucketSpec, Turn
from gradwire.hooks.chance import generator

TURN = Turn(BucketSpec(0, ("p",), ((4,),), ((1,),), torch.float32, torch.device("cpu")), rank=0, world_size=2)


def draw(turn: Turn, *, seed: int = 0, shared: bool = True) -> list[float]:
    return torch.rand(4, generator=generator(seed, turn, shared=shared)).tolist()


def test_shared_numbers_are_the_same_on_every_rank_and_own_numbers_are_not() -> None:
    other = replace(TURN, rank=1)
    assert draw(TURN) == draw(other)
    assert draw(TURN, shared=False) != draw(other, shared=False)


def test_numbers_depend_on_seed_step_and_bucket_and_on_nothing_else() -> None:
    assert draw(TURN) == draw(replace(TURN, donated=True, weight=3.0))
    changed = [replace(TURN, step=1), replace(TURN, spec=replace(TURN.spec, index=1))]
    assert all(draw(turn) != draw(TURN) for turn in changed)
    assert draw(TURN, seed=1) != draw(TURN)

"""Generators seeded by step, bucket and rank."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gradwire import hooks
from gradwire.hooks import BucketSpec, Reduction, Turn, after, chain, every, hierarchical, mean, partition, random_k
from gradwire.hooks.numerics.rng import generator
from gradwire.testing import simulate

TURN = Turn(BucketSpec(0, ("p",), ((4,),), ((1,),), torch.float32, torch.device("cpu")), rank=0, world_size=2)


def draw(turn: Turn, *, seed: int = 0, shared: bool = True) -> list[float]:
    return torch.rand(4, generator=generator(seed, turn, shared=shared)).tolist()


def test_shared_numbers_are_the_same_on_every_rank_and_own_numbers_are_not() -> None:
    other = Turn(TURN.spec, rank=1, world_size=2)
    assert draw(TURN) == draw(other)
    assert draw(TURN, shared=False) != draw(other, shared=False)


def test_numbers_depend_on_seed_step_and_bucket_and_on_nothing_else() -> None:
    assert draw(TURN) == draw(replace(TURN, donated=True, weight=3.0))
    changed = [Turn(TURN.spec, rank=0, world_size=2, step=1), replace(TURN, spec=replace(TURN.spec, index=1))]
    assert all(draw(turn) != draw(TURN) for turn in changed)
    assert draw(TURN, seed=1) != draw(TURN)


@dataclass(frozen=True)
class Draws(hooks.CommHook):
    """Records what it draws, per rank and shared."""

    own: list[float] = field(default_factory=list)
    common: list[float] = field(default_factory=list)

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        self.own.append(draw(turn, shared=False)[0])
        self.common.append(draw(turn)[0])
        return (yield from mean().reduce(grad, state, turn))


def test_two_parts_of_a_combinator_draw_different_numbers() -> None:
    hook = Draws()
    names = ("a", "b")
    spec = BucketSpec(0, names, ((4,), (4,)), ((1,), (1,)), torch.float32, torch.device("cpu"))
    hosts = [[0, 1], [2, 3]]
    for made, ranks, steps in (
        (hierarchical(inside=hook, across=hook), 4, 1),
        (partition({"a": hook, "b": hook}), 1, 2),
        (partition({"a": chain(random_k(0.5), hook), "b": chain(random_k(0.5), hook)}), 1, 2),
        (after(2, hook, before=hook), 1, 4),
        (every(2, hook, otherwise=hook), 1, 4),
    ):
        hook.own.clear()
        states: Any = None
        for step in range(steps):
            grads = [torch.ones(8)] * ranks
            done = simulate(made, grads, spec=spec, states=states, step=step, hosts=hosts if ranks == 4 else None)
            states = done.states
        assert len(set(hook.own)) == len(hook.own) == {4: 8, 1: 4}[ranks], made


def test_shared_numbers_are_those_of_the_ranks_that_meet() -> None:
    hook = Draws()
    simulate(hierarchical(inside=hook, across=hook), [torch.ones(8)] * 4, hosts=[[0, 1], [2, 3]])
    assert sorted(map(hook.common.count, set(hook.common))) == [2, 2, 2, 2]  # two hosts, two rails


def test_a_turn_keeps_its_original_rank_and_step() -> None:
    turn = Turn(TURN.spec, rank=3, world_size=4, step=5)
    assert turn.origin == (3, 5)
    assert replace(turn, rank=0, step=0).origin == (3, 5)
    assert draw(replace(turn, rank=0, step=0), shared=False) == draw(turn, shared=False)

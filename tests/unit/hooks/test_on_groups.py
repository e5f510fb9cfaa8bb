"""Hooks of several families over real groups: the same bits as on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.groups import Group
from gradwire.hooks import (
    BucketSpec,
    CommHook,
    Turn,
    chain,
    decoupled_momentum,
    dgc,
    error_feedback,
    mean,
    random_k,
    reduce_scatter_mean,
    scaled_cast,
    threshold,
    top_k,
)
from gradwire.hooks.pump import begin, pump
from gradwire.testing import run_ranks, simulate

HOOKS: list[CommHook] = [
    reduce_scatter_mean(),
    chain(scaled_cast(torch.float16), mean()),
    chain(error_feedback(), scaled_cast(torch.float8_e4m3fn), mean()),
    top_k(ratio=0.1, values=torch.bfloat16),
    threshold(relative=0.5),
    chain(random_k(0.25), mean()),
    dgc(0.1),
    decoupled_momentum(chunk=4, k=2),
]
SPEC = BucketSpec(0, ("w", "b"), ((9, 7), (5,)), ((7, 1), (1,)), torch.float32, torch.device("cpu"))


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(SPEC.numel, generator=torch.Generator().manual_seed(10 * step + rank))


def reduce_all(group: Group) -> list[list[Tensor]]:
    results = []
    for hook in HOOKS:
        state = hook.init(SPEC)
        values = []
        for step in range(2):
            turn = Turn(SPEC, group.rank, group.size, step, donated=True)
            grad = gradient(group.rank, step)
            reduction = begin(hook.reduce(grad, state, turn), hook, turn, grad.numel(), grad.dtype)
            values.append(pump(reduction, lambda op: group.submit(op).wait()).value.clone())
        results.append(values)
    return results


@pytest.mark.parametrize("kind", ["threads", "shared_memory", "gloo"])
def test_the_same_as_simulated(kind: str) -> None:
    ranks = 2
    got = run_ranks(reduce_all, ranks, kind=kind)
    for number, hook in enumerate(HOOKS):
        states: Any = None
        for step in range(2):
            done = simulate(hook, [gradient(r, step) for r in range(ranks)], spec=SPEC, states=states, step=step)
            states = done.states
            for rank in range(ranks):
                torch.testing.assert_close(
                    got[rank][number][step], done.reduced[rank].value, msg=f"{hook!r} over {kind}"
                )
                assert torch.equal(got[rank][number][step], got[0][number][step])

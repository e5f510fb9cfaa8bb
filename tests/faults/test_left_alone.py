"""A receive from any rank when all the others have closed their groups: PeerLost, long before the deadline."""

from __future__ import annotations

import time

import pytest
import torch

from gradwire.collectives import build
from gradwire.errors import PeerLost
from gradwire.groups import Group
from gradwire.testing import run_ranks
from gradwire.testing.conformance.compare import meet, part, side_group
from gradwire.testing.mpi import missing

DEADLINE = 120.0


def receive_alone(group: Group) -> float | None:
    """On rank 0: how long the receive waited after the others had left."""
    side = side_group(group)
    if group.rank:
        meet(side)
        group.close()
        meet(side)
        part(side)
        return None
    waiting = group.submit(build.recv(torch.zeros(1), label="from anyone").within(DEADLINE))
    meet(side)
    meet(side)
    began = time.perf_counter()
    with pytest.raises(PeerLost) as caught:
        waiting.wait()
    assert caught.value.rank in range(1, group.size)
    waited = time.perf_counter() - began
    with pytest.raises(PeerLost):
        group.run(build.recv(torch.zeros(1), tag=3).within(DEADLINE))
    part(side)
    return waited


@pytest.mark.parametrize("kind", ["threads", "shared_memory"])
def test_a_receive_from_any_rank_that_nobody_can_answer(kind: str) -> None:
    waited = run_ranks(receive_alone, 3, kind=kind)[0]
    assert waited < DEADLINE / 2


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_same_over_mpi() -> None:
    assert run_ranks(receive_alone, 2, kind="mpi")[0] < DEADLINE / 2

"""A rank that has one batch more than the others gets an error with advice."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.groups import Group
from gradwire.testing import kinds, run_ranks
from gradwire.testing.mpi import missing


@pytest.mark.parametrize("kind", kinds())
def test_one_step_more_points_to_join(kind: str) -> None:
    if kind == "mpi" and missing() is not None:
        pytest.skip(str(missing()))

    def rank_main(group: Group) -> str | None:
        model = gw.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        if group.rank != 1:
            group.close()
            return None
        with pytest.raises(gw.PeerLost) as caught:
            model(torch.ones(1, 2)).sum().backward()
        return str(caught.value)

    told = run_ranks(rank_main, 2, kind=kind)[1]
    assert "fewer batches" in told
    assert "model.join()" in told

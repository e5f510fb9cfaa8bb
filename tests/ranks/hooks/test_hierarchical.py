"""The hierarchical hook over a group of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.collectives import Layout
from gradwire.groups import Group
from gradwire.hooks import (
    hierarchical,
)
from gradwire.testing import run_ranks, simulate
from helpers.two_hosts import HALF, bucket, gradients, reduce_on, two_hosts


@pytest.mark.parametrize("hosts", [((0, 1), (2, 3)), ((0, 1, 2), (3,))], ids=["2 + 2", "3 + 1"])
@pytest.mark.parametrize("kind", ["threads", "shared memory"])
def test_a_group_computes_what_the_simulation_computes(hosts: Any, kind: str) -> None:
    brought = [g.float() for g in gradients(4, 34)]
    hook = hierarchical(across=HALF)
    expected = simulate(hook, brought, spec=bucket((17, 2)), hosts=hosts, donated=True).reduced[0].value

    def rank_main(world: Group) -> Tensor:
        with two_hosts(world, Layout(hosts)) as group:
            return reduce_on(group, hook, brought[world.rank].clone())

    for value in run_ranks(rank_main, 4, kind=kind.replace(" ", "_")):
        torch.testing.assert_close(value, expected)

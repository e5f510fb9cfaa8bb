"""Worlds on two nominal hosts, for tests of the hierarchical hook."""

import torch
from torch import Tensor

from gradwire.collectives import Layout
from gradwire.groups import Group, HierarchicalGroup
from gradwire.hooks import CommHook, Turn, cast, chain, mean
from gradwire.reducer.hook.driver import Driver
from helpers.buckets import bucket

HALF = chain(cast(torch.bfloat16), mean())


def two_hosts(world: Group, layout: Layout) -> HierarchicalGroup:
    host, index = layout.place(world.rank)
    inside = world.split(host, index)
    assert inside is not None
    across = world.split(index if index < layout.width else None, host)
    return HierarchicalGroup(inside, across, rank=world.rank)


def reduce_on(group: Group, hook: CommHook, grad: Tensor) -> Tensor:
    spec = bucket((grad.numel() // 2, 2))
    driver = Driver(group)
    try:
        turn = Turn(spec, group.rank, group.size, donated=True, hosts=group.layout)
        return driver.launch(hook, grad, hook.init(spec), turn).wait()
    finally:
        driver.close()

"""Worlds on two nominal hosts, for tests of the hierarchical hook."""

import torch
from torch import Tensor

from gradwire.collectives import Layout
from gradwire.groups import Group, HierarchicalGroup
from gradwire.hooks import BucketSpec, CommHook, Turn, cast, chain, mean
from gradwire.reducer.hook.driver import Driver

HALF = chain(cast(torch.bfloat16), mean())


def bucket(*shapes: tuple[int, ...]) -> BucketSpec:
    strides = tuple(tuple(torch.empty(shape, device="meta").stride()) for shape in shapes)
    names = tuple(f"p{i}" for i in range(len(shapes)))
    return BucketSpec(0, names, shapes, strides, torch.float32, torch.device("cpu"))


def gradients(ranks: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    return [torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(ranks)]


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
        turn = Turn(spec, group.rank, group.size, donated=True)
        return driver.launch(hook, grad, hook.init(spec), turn).wait()
    finally:
        driver.close()

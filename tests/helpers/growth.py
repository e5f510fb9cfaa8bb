"""What a process holds, to see that it does not grow.

Note [What fills slowly without leaking]
CPython keeps the last 4096 attributes that were looked up on types, each under the address of its name. torch looks attributes
up by strings that it creates each time (`__torch_function__`), so the same name has a new address each time, and up to 4096 dead
strings stay in that cache: some hundreds in a thousand steps, fewer in the next. Tests that count blocks empty it first.
"""

import gc
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradwire.groups import Group
from gradwire.groups.work import Work
from gradwire.hooks import GradBucket
from gradwire.parallel import DistributedDataParallel as DDP


def steps(model: nn.Module, n: int) -> None:
    for _ in range(n):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()


WARM, STEPS = 200, 300


def live(kind: type) -> int:
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())  # not isinstance: a dead proxy would raise


def blocks_in_use() -> int:
    """Python's allocated blocks, without garbage and without what lies in CPython's caches.

    See Note [What fills slowly without leaking].
    """
    gc.collect()
    clear = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache  # the first since Python 3.13
    clear()
    return sys.getallocatedblocks()


def in_use() -> dict[str, int]:
    return {
        "works": live(Work),
        "buckets": live(GradBucket),
        "blocks": blocks_in_use(),
        "kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def grown(make: Callable[[], nn.Module]) -> dict[str, int]:
    """What so many steps add every time: the least of two times, for what only warms up adds less and less."""
    model = make()
    steps(model, WARM)
    first = in_use()
    steps(model, STEPS)
    second = in_use()
    steps(model, STEPS)
    third = in_use()
    return {what: min(second[what] - first[what], third[what] - second[what]) for what in first}


def assert_nothing_grew(more: dict[str, int]) -> None:
    assert more["works"] <= 0
    assert more["buckets"] <= 0
    assert more["blocks"] < 0.1 * STEPS  # a leak is at least one of Python's blocks a step
    assert more["kilobytes"] < 3 * STEPS


def small(group: Group, **flags: Any) -> nn.Module:
    return DDP(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), process_group=group, **flags)

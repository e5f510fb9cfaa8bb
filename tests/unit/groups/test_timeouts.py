"""Every place that takes a timeout refuses invalid ones, before it waits for any rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import gradwire as gw
from gradwire.collectives import all_reduce
from gradwire.collectives.timeouts import LONGEST, timeout_seconds, wait_seconds
from gradwire.groups import C10dGroup, Deadline, HierarchicalGroup, SharedMemoryGroup, ThreadGroup
from gradwire.testing import run_ranks

WRONG = [math.nan, math.inf, -math.inf, -1, 0, 0.0, "5", True, 2 * LONGEST, timedelta(seconds=5), [5]]

PLACES: dict[str, Callable[[Any], object]] = {
    "gw.init(timeout)": lambda value: gw.init(timeout=value),
    "gw.init(meeting_timeout)": lambda value: gw.init(meeting_timeout=value),
    "ThreadGroup": lambda value: ThreadGroup.world(1, timeout=value),
    "SharedMemoryGroup": lambda value: SharedMemoryGroup(HashStore(), 0, 2, timeout=value),
    "C10dGroup.gloo": lambda value: C10dGroup.gloo(HashStore(), 0, 2, timeout=value),
    "HierarchicalGroup": lambda value: HierarchicalGroup.discover(HashStore(), 0, 2, timeout=value),
    "run_ranks": lambda value: run_ranks(str, 1, timeout=value),
    "a collective": lambda value: all_reduce(torch.zeros(1)).within(value),
    "a collective with a timeout": lambda value: all_reduce(torch.zeros(1)).within(5).within(value),
}


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_refused_with_its_value(place: str, value: Any) -> None:
    with pytest.raises(gw.UsageError) as caught:
        PLACES[place](value)
    assert f"timeout is {value!r}" in str(caught.value)


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_refused_by_a_group(value: Any) -> None:
    (group,) = ThreadGroup.world(1)
    for taker in (group.set_timeout, group.recover, group.monitored_barrier, lambda v: Deadline(group, seconds=v)):
        with pytest.raises(gw.UsageError, match="timeout is"):
            taker(value)
    group.close()


def test_from_process_group_does_not_take_zero_for_none() -> None:
    with C10dGroup.gloo(HashStore(), 0, 1) as inside:
        with pytest.raises(gw.UsageError, match="timeout is 0"):
            gw.from_process_group(inside.pg, timeout=0)


def test_a_time_out_that_only_torch_can_count_is_cut() -> None:
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(days=300 * 365)
    engine = dist.ProcessGroupGloo(HashStore(), 0, 1, options)
    with gw.from_process_group(engine) as group:
        assert group.timeout == LONGEST


@pytest.mark.parametrize("value", [1, 0.5, torch.tensor(2.0).item(), LONGEST])
def test_numbers_are_taken(value: float) -> None:
    assert timeout_seconds("x", value) == value


def test_waits_may_be_short_or_without_a_limit_of_their_own() -> None:
    (group,) = ThreadGroup.world(1)
    work = group.all_reduce(torch.ones(1))
    for value in (0, 0.0, math.inf, -1, timedelta(0), timedelta(seconds=-1), None):
        assert work.wait(value)
    for wrong in (math.nan, "5", True):
        with pytest.raises(gw.UsageError, match=r"wait.*timeout is"):
            work.wait(wrong)  # type: ignore[arg-type]
    assert wait_seconds("x", math.inf) == math.inf
    group.close(math.inf)

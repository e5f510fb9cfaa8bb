"""Collective events and deadlines of groups: what listeners get, and which timeout counts."""

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
from gradwire.events import (
    CollectiveEvent,
    CollectiveFailed,
    CollectiveFinished,
    CollectiveStarted,
    CollectiveSubmitted,
)
from gradwire.groups import C10dGroup, Deadline, HierarchicalGroup, SharedMemoryGroup, ThreadGroup
from gradwire.testing import run_ranks


def names(events: list[CollectiveEvent]) -> list[tuple[str, int]]:
    return [(type(event).__name__.removeprefix("Collective"), event.seq) for event in events]


def test_each_rank_gets_events_of_its_own_operations() -> None:
    world = ThreadGroup.world(2)
    received: list[list[CollectiveEvent]] = [[], []]
    for group, events in zip(world, received, strict=True):
        group.events.listen(events.append)
    first = world[0].all_reduce(torch.ones(2), async_op=True, label="x")
    assert names(received[0]) == [("Submitted", 0)]
    world[1].all_reduce(torch.ones(2), label="x")
    first.wait()
    for rank, events in enumerate(received):
        assert names(events) == [("Submitted", 0), ("Started", 0), ("Finished", 0)]
        assert [type(e) for e in events] == [CollectiveSubmitted, CollectiveStarted, CollectiveFinished]
        assert {(e.group, e.rank, e.kind, e.label, e.nbytes) for e in events} == {
            ("threads", rank, "all_reduce", "x", 8)
        }
        times = [event.time for event in events]
        assert times == sorted(times)
    for group in world:
        group.close()


def test_a_failure_is_reported_with_its_error() -> None:
    a, b = ThreadGroup.world(2)
    events: list[CollectiveEvent] = []
    a.events.listen(events.append)
    work = a.barrier(async_op=True)
    a.abort("enough")
    assert names(events) == [("Submitted", 0), ("Failed", 0)]
    failed = events[-1]
    assert isinstance(failed, CollectiveFailed)
    assert failed.error is work.exception()
    assert failed.duration == work.duration
    for group in (a, b):
        group.close()


def test_a_refused_operation_is_not_reported() -> None:
    (group,) = ThreadGroup.world(1)
    events: list[CollectiveEvent] = []
    group.events.listen(events.append)
    try:
        group.broadcast(torch.ones(1), src=4)
    except ValueError:
        pass
    assert events == []
    group.close()


def test_a_listener_that_raises_harms_no_operation() -> None:
    (group,) = ThreadGroup.world(1)

    def bad(event: CollectiveEvent) -> None:
        raise ValueError(type(event).__name__)

    group.events.listen(bad)
    assert group.all_reduce(torch.ones(2)).is_success()
    assert [str(error) for error in group.events.errors] == [
        "CollectiveSubmitted",
        "CollectiveStarted",
        "CollectiveFinished",
    ]
    group.close()


def test_a_listener_may_submit() -> None:
    (group,) = ThreadGroup.world(1)
    inner: list[bool] = []

    def curious(event: CollectiveEvent) -> None:
        if isinstance(event, CollectiveFinished) and not inner:
            inner.append(False)
            inner[0] = group.barrier().is_success()

    group.events.listen(curious)
    group.barrier()
    assert inner == [True]
    group.close()


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

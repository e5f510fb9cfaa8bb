"""Events of a group: what a listener gets for operations that succeed and fail, on which rank, in which order."""

from __future__ import annotations

import torch

from gradwire.events import (
    CollectiveEvent,
    CollectiveFailed,
    CollectiveFinished,
    CollectiveStarted,
    CollectiveSubmitted,
)
from gradwire.groups import ThreadGroup


def names(events: list[CollectiveEvent]) -> list[tuple[str, int]]:
    return [(type(event).__name__.removeprefix("Collective"), event.seq) for event in events]


def test_each_rank_hears_of_its_own_operations() -> None:
    world = ThreadGroup.world(2)
    heard: list[list[CollectiveEvent]] = [[], []]
    for group, events in zip(world, heard, strict=True):
        group.events.listen(events.append)
    first = world[0].all_reduce(torch.ones(2), async_op=True, label="x")
    assert names(heard[0]) == [("Submitted", 0)]
    world[1].all_reduce(torch.ones(2), label="x")
    first.wait()
    for rank, events in enumerate(heard):
        assert names(events) == [("Submitted", 0), ("Started", 0), ("Finished", 0)]
        assert [type(e) for e in events] == [CollectiveSubmitted, CollectiveStarted, CollectiveFinished]
        assert {(e.group, e.rank, e.kind, e.label, e.nbytes) for e in events} == {
            ("threads", rank, "all_reduce", "x", 8)
        }
        times = [event.time for event in events]
        assert times == sorted(times)
    for group in world:
        group.close()


def test_a_failure_is_told_with_its_error() -> None:
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


def test_a_refused_operation_is_not_told() -> None:
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

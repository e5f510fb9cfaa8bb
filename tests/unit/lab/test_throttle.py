"""Throttled: never faster than its link, not much slower, and otherwise the group inside."""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from gradwire.collectives import all_reduce, build
from gradwire.errors import ClosedError, CollectiveTimeout, GroupAborted, UsageError
from gradwire.groups import Group, ThreadGroup
from gradwire.lab import Throttled, throttle
from gradwire.lab.throttle import Link, crossing_bytes
from gradwire.testing import run_ranks

MBIT = 8.0  # a million bytes a second
LATE = 30.0
"""Seconds by which a busy machine may be late."""


def link(group: Group) -> Throttled:
    return Throttled(group, mbit=MBIT, latency_ms=20)


def took(fn) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def test_an_operation_takes_its_bytes_and_the_latency():
    def rank(group):
        t = torch.full((25_000,), float(group.rank))
        seconds = took(lambda: group.all_reduce(t))  # 100 KB: 0.1 s, and 0.02 s
        return seconds, t[0].item(), group.sent_bytes

    for seconds, value, sent in run_ranks(rank, 2, wrap=link):
        assert 0.12 <= seconds <= 0.12 + LATE
        assert (value, sent) == (1.0, 100_000.0)


def test_a_barrier_takes_the_latency():
    for seconds in run_ranks(lambda group: took(group.barrier), 3, wrap=link):
        assert 0.02 <= seconds <= 0.02 + LATE


def test_submit_does_not_block_and_operations_in_flight_share_the_rate_but_not_the_latency(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(throttle, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    arrivals = []
    send = Link.send

    def recorded(self, nbytes, *, now):
        arrivals.append(send(self, nbytes, now=now))
        return arrivals[-1]

    monkeypatch.setattr(Link, "send", recorded)
    groups = [Throttled(group, mbit=MBIT, latency_ms=300) for group in ThreadGroup.world(2)]
    works = [group.submit(all_reduce(torch.ones(25_000), label=f"{i}")) for i in range(3) for group in groups]
    assert not any(work.is_completed() for work in works)  # the clock stands still, and submit has returned
    assert sorted(arrivals) == pytest.approx([100.4, 100.4, 100.5, 100.5, 100.6, 100.6])
    clock.now = 101.0
    for work in works:
        assert work.wait()
    for group in groups:
        group.close()


def test_a_part_of_the_group_uses_the_same_link():
    def rank(group):
        part = group.split(0)
        seconds = took(lambda: [w.wait() for w in [g.submit(all_reduce(torch.ones(25_000))) for g in (group, part)]])
        same = part.link is group.link
        part.close()
        return same, seconds

    for same, seconds in run_ranks(rank, 2, wrap=link):
        assert same
        assert seconds >= 0.22


def test_a_time_out_is_told_in_the_callers_words_when_a_rank_is_missing():
    a, b = map(link, ThreadGroup.world(2, timeout=30))
    with pytest.raises(CollectiveTimeout) as caught:
        a.submit(all_reduce(torch.ones(3), label="loss").within(0.2)).wait()
    assert caught.value.missing == (1,)
    assert "of Throttled(threads)" in str(caught.value)
    for group in (a, b):
        group.close(timeout=0)


def test_a_time_out_says_that_the_link_is_slow_when_all_have_come():
    def rank(group):
        with pytest.raises(CollectiveTimeout, match="the link is slow") as caught:
            group.submit(all_reduce(torch.ones(250_000)).within(0.3)).wait()  # would take a second
        return caught.value.missing

    assert run_ranks(rank, 2, wrap=link) == [(), ()]


def test_abort_ends_what_is_on_the_link_and_recovery_clears_it():
    def rank(group):
        work = group.submit(all_reduce(torch.ones(5_000_000)))  # would take 20 s
        group.inner.barrier()
        if group.rank == 0:
            group.abort("enough")
        with pytest.raises(GroupAborted):
            work.wait()
        group.recover()
        return took(group.barrier)

    for seconds in run_ranks(rank, 2, wrap=link):
        assert 0.02 <= seconds < 15  # the 20 s of what was aborted are not on the link


def test_close_waits_for_what_is_on_the_link_and_fails_what_takes_longer():
    a, b = map(link, ThreadGroup.world(2))
    short = [g.submit(all_reduce(torch.ones(10_000))) for g in (a, b)]
    a.close()
    assert short[0].is_success()
    long = None
    with pytest.raises(ClosedError):
        long = a.submit(all_reduce(torch.ones(1)))
    assert long is None
    b.close()

    a, b = map(link, ThreadGroup.world(2))
    works = [g.submit(all_reduce(torch.ones(5_000_000))) for g in (a, b)]
    assert took(lambda: (a.close(timeout=0.05), b.close(timeout=0.05))) < 15  # the link would take 20 s
    for work in works:
        with pytest.raises(ClosedError):
            work.wait()
    assert not [t for t in threading.enumerate() if "gradwire-link" in t.name]


def test_a_group_that_is_dropped_leaves_no_thread():
    (group,) = map(link, ThreadGroup.world(1))
    inner = group.inner
    group.all_reduce(torch.ones(1))
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    assert not [t for t in threading.enumerate() if "gradwire-link" in t.name]
    inner.close()


def test_what_hangs_on_a_future_may_wait_for_another_operation():
    """As torch's PowerSGD hook does."""

    def rank(group):
        t = torch.ones(100)
        first = group.submit(all_reduce(t)).get_future()
        second = first.then(lambda f: group.submit(all_reduce(f.value()[0])).get_future().wait()[0])
        return second.wait()[0].item()

    assert run_ranks(rank, 2, wrap=link) == [4.0, 4.0]


def test_what_the_inner_group_refuses_is_refused():
    a, b = map(link, ThreadGroup.world(2))
    a.inner.abort("no more")
    with pytest.raises(GroupAborted, match="no more"):
        a.barrier()
    for group in (a, b):
        group.close(timeout=0)


@pytest.mark.parametrize("bad", [{"mbit": 0}, {"mbit": -1}, {"mbit": float("inf")}, {"mbit": 1, "latency_ms": -1}])
def test_a_link_needs_a_rate(bad):
    (group,) = ThreadGroup.world(1)
    with pytest.raises(UsageError, match="the rate must be above 0"):
        Throttled(group, **bad)
    group.close()


def test_who_only_receives_waits_for_what_he_receives():
    ten = torch.zeros(10)
    assert crossing_bytes(build.gather(ten, [torch.zeros(10) for _ in range(4)], dst=0), rank=0, size=4) == 120
    assert crossing_bytes(build.gather(ten, dst=0), rank=1, size=4) == 40
    assert crossing_bytes(build.scatter(ten, src=0), rank=1, size=4) == 40
    assert crossing_bytes(build.recv(ten, src=1), rank=0, size=2) == 40
    assert crossing_bytes(build.send(ten, dst=1), rank=0, size=2) == 40


def test_a_link_that_was_idle_is_free():
    link = Link(mbit=8, latency_ms=0)
    assert link.send(1_000_000, now=0.0) == pytest.approx(1.0)
    assert link.send(1_000_000, now=5.0) == pytest.approx(6.0)
    link._free = 0.0
    assert link.send(0, now=5.0) == pytest.approx(5.0)

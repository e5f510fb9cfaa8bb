"""Membership: how much it asks of the store, and what it knows of groups over one process group."""

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.collectives import build
from gradwire.errors import CollectiveTimeout, GroupAborted, PeerLost
from gradwire.groups import C10dGroup, ThreadGroup
from gradwire.groups.c10d.own_engines import abort_gloo
from gradwire.groups.failure import membership
from gradwire.groups.failure.membership import Membership
from gradwire.groups.failure.monitor import Monitor
from gradwire.interop import from_process_group


class Counting:
    """A HashStore that counts calls, as a connection that many ranks share."""

    def __init__(self, calls: Counter[str], inner: Any) -> None:
        self._calls, self._inner = calls, inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self._calls[name] += 1
            return method(*args)

        return call


def _world(size: int, calls: Counter[str]) -> list[Membership]:
    store = dist.HashStore()
    ranks = [Membership(store, rank, size) for rank in range(size)]
    for rank in ranks:
        rank._connection = Counting(calls, store)
    return ranks


@pytest.mark.parametrize("size", [8, 64])
def test_traffic_while_everybody_waits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation in flight on all ranks for 10 seconds; there were 2 size calls per rank ten times a second."""
    calls: Counter[str] = Counter()
    ranks, now = _world(size, calls), [1000.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    for rank in ranks:
        rank.joined = 1
    for tick in range(100):
        now[0] = 1000.0 + tick / 10
        for rank in ranks:
            rank.tick(slow=True)
    assert all(member.joined == 1 for rank in ranks for member in rank.peers.members.values())
    assert sum(calls.values()) <= 20 * size, calls


def test_operations_that_finish_at_once_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    (rank, other), now = _world(2, calls), [1000.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    for tick in range(100):
        now[0] = 1000.0 + tick / 10
        rank.joined += 1
        rank.tick(slow=False)
    assert not calls
    for tick in range(100, 120):  # a pause
        now[0] = 1000.0 + tick / 10
        rank.tick(slow=False)
    assert calls == {"set": 1, "add": 1}
    other.refresh()
    assert other.peers.members[0].joined == 100


class Rank:
    """One rank's process group, and the groups that it has opened over it."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        cpu, gloo = torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO
        self.rank = rank
        self.pg = dist.ProcessGroup(dist.PrefixStore("pg", store), rank, SIZE)
        self.pg._set_default_backend(gloo)
        self.engine = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, SIZE, timedelta(seconds=60))
        self.pg._register_backend(cpu, gloo, self.engine)
        self.opened: list[Any] = []

    def open(self) -> C10dGroup:
        self.opened.append(from_process_group(self.pg, timeout=3))
        return self.opened[-1]

    def close(self) -> None:
        for group in self.opened:
            if group is not None:
                group.close(0)
        abort_gloo(self.engine)
        del self.pg, self.engine, self.opened

    def membership(self) -> Membership:
        found = self.opened[-1]._monitor.membership
        assert isinstance(found, Membership)
        return found


SIZE = 3


@pytest.fixture
def ranks() -> Iterator[Callable[[Callable[[Rank], Any]], list[Any]]]:
    """Runs a function on all ranks, each a thread with a process group of its own."""
    store = dist.HashStore()
    with ThreadPoolExecutor(SIZE) as pool:
        world = list(pool.map(lambda rank: Rank(store, rank), range(SIZE)))
        yield lambda fn: list(pool.map(fn, world))
        for rank in world:
            rank.close()


def _one_looks(rank: Rank) -> None:
    if rank.rank == 0:
        rank.open().close()
    rank.open()


def _one_closes_and_reopens(rank: Rank) -> None:
    rank.open().barrier()
    if rank.rank == 0:
        rank.opened[-1].close()
        rank.open()


def _all_close_and_reopen(rank: Rank) -> None:
    rank.open().barrier()
    rank.opened[-1].close()
    rank.open().barrier()


def _one_drops(rank: Rank) -> None:
    rank.open().barrier()
    if rank.rank == 0:
        rank.opened[-1] = None
        gc.collect()
        rank.open()


def _two_at_once(rank: Rank) -> None:
    rank.open().barrier()
    rank.open().barrier()
    rank.opened[0].barrier()


def _two_at_once_on_one_rank(rank: Rank) -> None:
    rank.open()
    if rank.rank == 0:
        rank.open()
    rank.opened[-1].barrier()


HISTORIES = [
    _one_looks,
    _one_closes_and_reopens,
    _all_close_and_reopen,
    _one_drops,
    _two_at_once,
    _two_at_once_on_one_rank,
]


@pytest.mark.parametrize("history", HISTORIES)
def test_a_time_out_names_who_is_missing_whatever_groups_ranks_have_made(
    ranks: Any, history: Callable[[Rank], None]
) -> None:
    ready = threading.Barrier(SIZE)

    def last_one_missing(rank: Rank) -> Any:
        history(rank)
        group = rank.opened[-1]
        ready.wait(60)
        if rank.rank == SIZE - 1:
            return None
        with pytest.raises(CollectiveTimeout) as caught:
            group.all_reduce(torch.ones(3))
        return caught.value.joined, caught.value.missing

    assert ranks(last_one_missing) == [((0, 1), (2,))] * 2 + [None]


@pytest.mark.parametrize("history", HISTORIES)
def test_a_rank_that_leaves_is_lost_whatever_groups_ranks_have_made(
    ranks: Any, history: Callable[[Rank], None]
) -> None:
    def last_one_leaves(rank: Rank) -> Any:
        history(rank)
        rank.opened[-1].barrier()
        if rank.rank == SIZE - 1:
            for group in rank.opened:
                group.close()
            return None
        with pytest.raises(PeerLost) as caught:
            rank.opened[-1].all_reduce(torch.ones(3))
        return caught.value.rank

    assert ranks(last_one_leaves) == [2, 2, None]


def test_a_rank_that_has_closed_its_group_and_will_open_another_is_not_lost(ranks: Any) -> None:
    """All ranks reopen, and rank 1 is slow: the others see for a while that it has left."""
    world: dict[int, Rank] = {}
    ready = threading.Barrier(SIZE)

    def reopen(rank: Rank) -> float:
        world[rank.rank] = rank
        rank.open().barrier()
        rank.opened[-1].close()
        ready.wait(60)
        if rank.rank == 1:
            ready.wait(60)
            for other in (world[0], world[2]):
                other.membership().refresh()
                assert other.membership().peers.members[1].left == "closed"
                assert other.membership().peers.left_before(2) is None
                other.opened[-1].check_peers()
        tensor = torch.ones(3)
        group = rank.open()
        work = group.submit(build.all_reduce(tensor))
        if rank.rank != 1:
            ready.wait(60)
        work.wait()
        return float(tensor[0])

    assert ranks(reopen) == [SIZE] * SIZE


def test_a_failure_of_an_earlier_group_is_not_one_of_the_next(ranks: Any) -> None:
    ready = threading.Barrier(SIZE)

    def abort_and_reopen(rank: Rank) -> None:
        rank.open().barrier()
        ready.wait(60)
        if rank.rank == 0:
            rank.opened[-1].abort("enough")
        ready.wait(60)
        if rank.rank != 0:
            with pytest.raises(GroupAborted, match="rank 0 aborted: enough"):
                rank.opened[-1].check_peers()
        rank.opened[-1].close()
        rank.open().check_peers()
        rank.opened[-1].barrier()

    ranks(abort_and_reopen)


class Opened:
    """A group over a process group, as far as its membership is concerned."""

    def __init__(self, pg: object, store: dist.Store, rank: int) -> None:
        self.rank, self.size = rank, 2
        self.membership = Membership.of(pg, store, self)

    def close(self) -> None:
        self.membership.leave("closed", self)


class ProcessGroup:
    """Nothing but an identity."""


def test_a_process_group_that_is_made_again_over_the_same_store() -> None:
    """As after destroy_process_group under torchrun: what ranks wrote about the first is not about the second."""
    store = dist.HashStore()
    first, second = [ProcessGroup(), ProcessGroup()], [ProcessGroup(), ProcessGroup()]
    ranks = [Opened(first[rank], store, rank) for rank in range(2)]
    for each in ranks:
        each.membership.joined = 57
        each.membership.record_failure(None, "rank 1 aborted")
        each.close()
    new = Opened(second[0], store, 0)
    new.membership.joined = 1
    assert new.membership.have_joined(1) is None
    assert new.membership.peers.left_before(100) is None
    assert new.membership.peers.failure_record is None
    other = Opened(second[1], store, 1)
    assert new.membership.have_joined(1) == (0,)
    other.membership.joined = 1
    other.membership.publish()
    assert new.membership.have_joined(1) == (0, 1)
    other.close()
    assert new.membership.have_joined(2) == (0,)
    assert new.membership.peers.left_before(2) == 1


def test_a_recovery_that_failed_is_not_taken_for_one_of_the_next_group() -> None:
    store, pgs = dist.HashStore(), [ProcessGroup(), ProcessGroup()]
    ranks = [Opened(pgs[rank], store, rank) for rank in range(2)]
    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not called recover"):
        ranks[0].membership.start_over(0, 0.01)
    for each in ranks:
        each.close()
    ranks = [Opened(pgs[rank], store, rank) for rank in range(2)]
    with pytest.raises(TimeoutError, match=r"ranks \[0\] have not called recover"):
        ranks[1].membership.start_over(0, 0.01)
    with ThreadPoolExecutor(2) as pool:
        prefixes = list(pool.map(lambda each: each.membership.start_over(0, 60), ranks))
    assert prefixes[0] == prefixes[1]
    assert prefixes[0][1]


def test_ranks_that_number_process_groups_differently_name_nobody() -> None:
    """Rank 0 alone has opened a group over a process group that was made again since."""
    store = dist.HashStore()
    first, second = ProcessGroup(), [ProcessGroup(), ProcessGroup()]
    Opened(first, store, 0).close()
    ranks = [Opened(second[rank], store, rank) for rank in range(2)]
    ranks[1].membership.joined = 1
    ranks[1].membership.publish()
    assert [each.membership.have_joined(1) for each in ranks] == [None, None]
    with pytest.raises(TimeoutError, match="the missing ones are not known"):
        ranks[0].membership.start_over(0, 0.01)


def test_who_has_joined_is_not_known_once_the_store_is_lost() -> None:
    ranks = _world(2, Counter())
    assert ranks[0].have_joined(1) == (0,)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection reset by peer")

    ranks[0]._connection = Gone()
    assert [ranks[0].have_joined(1) for _ in range(3)][-1] is None


def test_what_ranks_wrote_at_the_end_of_an_earlier_group_is_not_about_the_next(ranks: Any) -> None:
    """However many collectives they had counted: some may have gone through torch on one rank and through gradwire on another."""
    ready = threading.Barrier(SIZE)

    def count_differently(rank: Rank) -> None:
        group = rank.open()
        group.barrier()
        ready.wait(60)
        rank.membership().joined += 2 * (rank.rank == 0)
        ready.wait(60)
        if rank.rank == 0:
            group.abort("enough")
        ready.wait(60)
        group.close()
        ready.wait(60)
        rank.open().check_peers()
        ready.wait(60)
        rank.opened[-1].check_peers()
        rank.opened[-1].barrier()

    ranks(count_differently)


class Stalling:
    """A store, seen by one rank, of which one call stalls until it is released: `nth` from now, counted from 1."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.nth = 0
        self.stalled, self.release = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            value = method(*args)
            self.nth -= 1
            if self.nth == 0:
                self.stalled.set()
                assert self.release.wait(60)
            return value

        return call


@pytest.mark.parametrize("changes", range(4))
@pytest.mark.parametrize("nth", range(1, 9))
def test_an_exchange_that_outlives_its_epoch_hides_no_failure_of_the_next_and_invents_none(
    nth: int, changes: int
) -> None:
    """Stalled at each of its calls, and for each number of changes in the next epoch: one is that of the first."""
    store = dist.HashStore()
    slow = Stalling(store)
    waits, other = Membership(slow, 0, 2), Membership(store, 1, 2)
    other.record_failure(None, "the first")
    waits.joined, slow.nth = 1, nth
    waits.tick(slow=True)  # writes and reads, on a thread, and stalls
    assert slow.stalled.wait(60)

    with ThreadPoolExecutor(2) as meeting:
        recovered = [meeting.submit(rank.start_over, 0, 60.0) for rank in (waits, other)]
        assert recovered[1].result(60)
        while waits._recoveries == 0:
            pass
        slow.release.set()
        recovered[0].result(60)
    assert waits.peers.failure_record is None

    for _ in range(changes):
        other.joined += 1
        other.publish()
    other.record_failure(None, "the second")
    waits.refresh()
    assert waits.peers.failure_record == (None, "the second")
    for rank in (waits, other):
        rank.leave("closed")


def fails_while_stalled() -> tuple[Stalling, Membership, Membership]:
    """A store that does not answer, the rank that has recorded a failure meanwhile, and another."""
    store = dist.HashStore()
    slow = Stalling(store)
    fails, other = Membership(slow, 0, 2), Membership(store, 1, 2)
    fails.joined, slow.nth = 1, 2
    fails.tick(slow=True)
    assert slow.stalled.wait(60)
    fails.record_failure(None, "aborted")
    return slow, fails, other


def test_a_failure_is_reported_once_the_store_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_REPORTED_WITHIN", 0.01)
    slow, fails, other = fails_while_stalled()
    other.refresh()
    assert other.peers.failure_record is None
    slow.release.set()
    deadline = time.monotonic() + 60
    while other.peers.failure_record is None and time.monotonic() < deadline:
        fails.tick(slow=False)
        other.refresh()
    assert other.peers.failure_record == (None, "aborted")
    for rank in (fails, other):
        rank.leave("closed")


def test_a_rank_that_recovers_has_reported_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may still wait in an operation, and recover only once they know."""
    monkeypatch.setattr(membership, "_REPORTED_WITHIN", 0.0)
    slow, fails, other = fails_while_stalled()
    slow.release.set()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] have not called"):
        fails.start_over(0, 0.01)
    other.refresh()
    assert other.peers.failure_record == (None, "aborted")
    for rank in (fails, other):
        rank.leave("closed")


def test_a_loss_that_another_rank_has_reported_is_not_its_own_reason() -> None:
    store, world = dist.HashStore(), ThreadGroup.world(3)
    reporter, reader = (Monitor(world[rank], Membership.over(store, rank, 3)) for rank in range(2))
    reporter.report(PeerLost("rank 2 is lost: its process has died.", rank=2))
    with pytest.raises(PeerLost, match=r"rank 2 is lost: rank 0 has reported it\."):
        reader.check_peers()
        world[1].check_peers()
    for group in world:
        group.close(0)

"""Collectives of one host, and of one rank per host: on the group that knows of hosts, and on those that do not."""

import threading
from typing import Any

import pytest
import torch

from gradwire.collectives import Layout, ReduceOp, Scope, all_gather, all_reduce, broadcast, send
from gradwire.errors import CollectiveTimeout, UsageError
from gradwire.groups import Group, HierarchicalGroup, ThreadGroup
from gradwire.testing import run_ranks
from helpers.rank_tests import on_ranks
from helpers.waiting import wait_until

TWO_BY_TWO = Layout(((0, 2), (1, 3)))


def made(world: Group, layout: Layout, **named: Any) -> HierarchicalGroup:
    host, index = layout.place(world.rank)
    inside = world.split(host, index)
    assert inside is not None
    across = world.split(index if index < layout.width else None, host)
    return HierarchicalGroup(inside, across if len(layout.hosts) > 1 else None, rank=world.rank, **named)


def test_each_scope_has_its_own_ranks() -> None:
    def rank_main(world: Group) -> list[list[float]]:
        with made(world, TWO_BY_TWO) as group:
            results = []
            for scope in (Scope.INSIDE, Scope.ACROSS, Scope.WORLD):
                t = torch.tensor([10.0**world.rank])
                group.submit(all_reduce(t).among(scope)).wait()
                results.append(t.tolist())
            places = [torch.empty(1), torch.empty(1)]
            group.run(all_gather(places, torch.tensor([float(world.rank)])).among(Scope.ACROSS))
            results.append(torch.cat(places).tolist())
            first = torch.tensor([float(world.rank)])
            group.run(broadcast(first, src=1).among(Scope.INSIDE))
            results.append(first.tolist())
            return results

    assert run_ranks(rank_main, 4, kind="threads") == [
        [[101.0], [11.0], [1111.0], [0.0, 1.0], [2.0]],
        [[1010.0], [11.0], [1111.0], [0.0, 1.0], [3.0]],
        [[101.0], [1100.0], [1111.0], [2.0, 3.0], [2.0]],
        [[1010.0], [1100.0], [1111.0], [2.0, 3.0], [3.0]],
    ]


def test_scopes_keep_their_place_among_operations_that_are_under_way() -> None:
    """Nothing waits between them, and whatever the timing all ranks' parts see the same order."""

    def rank_main(world: Group) -> list[float]:
        with made(world, TWO_BY_TWO) as group:
            tensors, works = [], []
            for i in range(60):
                tensors.append(torch.full((3,), float(i)))
                scope = (Scope.WORLD, Scope.INSIDE, Scope.ACROSS, Scope.WORLD)[i % 4]
                works.append(group.submit(all_reduce(tensors[-1], op=ReduceOp.AVG).among(scope)))
            for work in works:
                work.wait()
            return [t[0].item() for t in tensors]

    assert run_ranks(rank_main, 4, kind="threads") == [[float(i) for i in range(60)]] * 4


def test_between_hosts_there_is_nobody_where_there_is_one() -> None:
    def rank_main(world: Group) -> list[float]:
        with made(world, Layout(((0, 1),))) as group:
            t = torch.tensor([3.0])
            group.run(all_reduce(t).among(Scope.ACROSS))
            group.run(all_reduce(t).among(Scope.INSIDE))
            return t.tolist()

    assert run_ranks(rank_main, 2, kind="threads") == [[6.0]] * 2


def test_who_is_no_carrier_does_not_talk_to_other_hosts() -> None:
    def rank_main(world: Group) -> str:
        with made(world, Layout(((0, 1), (2,)))) as group:
            op = all_reduce(torch.ones(1)).among(Scope.ACROSS)
            if world.rank != 1:
                group.run(op)
                return ""
            with pytest.raises(UsageError, match="it is not a carrier; only the first 1 ranks of each host") as caught:
                group.run(op)
            return str(caught.value)

    assert run_ranks(rank_main, 3, kind="threads")[1]


@on_ranks(4, kind="threads")
def test_ranks_are_counted_within_the_scope(world: Group) -> None:
    with made(world, TWO_BY_TWO) as group:
        with pytest.raises(UsageError, match="root is 3, but the group has ranks 0 to 1"):
            group.run(broadcast(torch.ones(1), src=3).among(Scope.INSIDE))


def test_a_time_out_names_the_missing_in_ranks_of_the_whole() -> None:
    """Rank 3 does not come to its host's all-reduce; its mate, rank 1, says so."""
    over = threading.Event()

    def rank_main(world: Group) -> Any:
        with made(world, TWO_BY_TWO, timeout=20) as group:
            if world.rank in (0, 2):
                group.run(all_reduce(torch.ones(1)).among(Scope.INSIDE))
            if world.rank != 1:
                assert over.wait(15)
                return None
            try:
                with pytest.raises(CollectiveTimeout) as caught:
                    group.run(all_reduce(torch.ones(1)).among(Scope.INSIDE).within(0.3))
            finally:
                over.set()
            return caught.value.joined, caught.value.missing, "scope=inside" in str(caught.value)

    assert run_ranks(rank_main, 4, kind="threads")[1] == ((1,), (3,), True)


def test_the_whole_may_time_out_before_the_part_that_carries_it_out() -> None:
    """Then the part fails with the error of the whole, which is about ranks of the whole already."""
    over = threading.Event()

    def rank_main(world: Group) -> Any:
        with made(world, TWO_BY_TWO, timeout=20) as group:
            if world.rank != 1:
                assert over.wait(15)
                return None

            def expire() -> None:
                wait_until(lambda: group.inside.ledger.pending, "the part has begun", limit=10)
                (work,) = group.ledger.pending.values()
                group.ledger.expire(work)

            helper = threading.Thread(target=expire)
            helper.start()
            try:
                with pytest.raises(CollectiveTimeout) as caught:
                    group.run(all_reduce(torch.ones(1)).among(Scope.INSIDE))
            finally:
                over.set()
                helper.join()
            return caught.value.joined, caught.value.missing

    assert run_ranks(rank_main, 4, kind="threads")[1] == ((1,), (3,))


def test_a_group_without_hosts_refuses_a_scope() -> None:
    (group,) = ThreadGroup.world(1)
    for scope in (Scope.INSIDE, Scope.ACROSS):
        with pytest.raises(UsageError, match="does not know which ranks share a host"):
            group.submit(all_reduce(torch.ones(1)).among(scope))
    assert group.layout is None
    group.close()


def test_messages_have_no_scope() -> None:
    with pytest.raises(UsageError, match="a message with the scope inside"):
        send(torch.ones(1), dst=0).among(Scope.INSIDE)

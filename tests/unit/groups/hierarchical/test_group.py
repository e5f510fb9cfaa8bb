"""HierarchicalGroup beyond the conformance suite: what its parts do, what it demands of them, how it fails and recovers."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from gradwire.collectives import OpKind, ReduceOp
from gradwire.errors import CollectiveMismatch, CollectiveTimeout, GroupError, PeerLost, UsageError
from gradwire.groups import Group, HierarchicalGroup, Recording, ThreadGroup
from gradwire.groups.hierarchical import Layout
from gradwire.groups.store import rendezvous
from gradwire.testing import run_ranks
from helpers.threads import run_threads


def _parts(world: Group, layout: Layout) -> tuple[Group, Group | None]:
    host, index = layout.place(world.rank)
    inside = world.split(host, index)
    assert inside is not None
    return inside, world.split(index if index < layout.width else None, host)


def _made(world: Group, layout: Layout, **named: Any) -> HierarchicalGroup:
    inside, across = _parts(world, layout)
    return HierarchicalGroup(inside, across, rank=world.rank, **named)


TWO_BY_TWO = Layout(((0, 1), (2, 3)))
UNEVEN = Layout(((0, 1, 2), (3,)))


def on_threads(fn: Callable[[Group], Any], layout: Layout = TWO_BY_TWO) -> list[Any]:
    return run_ranks(fn, layout.size, kind="threads")


# -- what goes where ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [TWO_BY_TWO, UNEVEN, Layout(((0, 1), (2, 3)), rails=1)], ids=["2 + 2", "3 + 1", "leaders"]
)
def test_every_byte_of_an_all_reduce_is_in_one_lane(layout: Layout) -> None:
    n = 10_007

    def bytes_across(world: Group) -> int:
        inside, across = _parts(world, layout)
        record = None if across is None else Recording(across)
        with HierarchicalGroup(inside, record, rank=world.rank) as group:
            group.all_reduce(torch.ones(n))
        infos = [] if record is None else record.finished
        return sum(info.bytes for info in infos if info.kind == "all_reduce")

    counts = on_threads(bytes_across, layout)
    for ranks in layout.hosts:
        assert sum(counts[rank] for rank in ranks) == 4 * n
    assert sum(count > 0 for count in counts) == len(layout.hosts) * layout.width


def test_small_tensors_use_one_lane() -> None:
    def kinds(world: Group) -> list[OpKind]:
        inside, across = _parts(world, TWO_BY_TWO)
        assert across is not None
        with HierarchicalGroup(inside, (record := Recording(across))) as group:
            before = len(record.submitted)
            group.all_reduce(torch.ones(10))
            return [signature.kind for signature in record.submitted[before:]]

    assert on_threads(kinds) == [[OpKind.ALL_REDUCE], [], [OpKind.ALL_REDUCE], []]


@pytest.mark.parametrize("layout", [TWO_BY_TWO, UNEVEN], ids=["2 + 2", "3 + 1"])
def test_an_average_of_narrow_numbers_does_not_overflow(layout: Layout) -> None:
    def average(world: Group) -> tuple[list[float], list[float]]:
        with _made(world, layout) as group:
            t = torch.full((4,), 40_000.0, dtype=torch.float16)
            group.all_reduce(t, ReduceOp.AVG)
            part = torch.empty(1, dtype=torch.float16)
            group.reduce_scatter_tensor(part, torch.full((4,), 40_000.0, dtype=torch.float16), ReduceOp.AVG)
            return t.tolist(), part.tolist()

    assert on_threads(average, layout) == [([40_000.0] * 4, [40_000.0])] * 4


# -- what it demands ---------------------------------------------------------------------------------------------------------


def _refusal(world: Group, make: Callable[[Group], Any]) -> str:
    try:
        make(world)
    except UsageError as error:
        return str(error)
    return "nothing was refused"


def test_lanes_between_the_wrong_ranks_are_refused_on_every_rank() -> None:
    def make(world: Group) -> None:
        host = world.rank // 2
        inside = world.split(host)
        across = world.split((world.rank + host) % 2, host)  # rank 0 with rank 3, rank 1 with rank 2
        assert inside is not None
        HierarchicalGroup(inside, across)

    for message in on_threads(lambda world: _refusal(world, make)):
        assert "an `across` joins ranks whose places in their hosts are" in message
        assert "join the ranks of equal rank" in message


def test_leaders_that_are_not_first_are_refused() -> None:
    def make(world: Group) -> None:
        inside, last = world.split(world.rank // 2), world.rank % 2
        across = world.split(0 if last else None)
        assert inside is not None
        HierarchicalGroup(inside, across)

    for message in on_threads(lambda world: _refusal(world, make)):
        assert "not the first" in message or "places in their hosts are [[1, 1]]" in message


@pytest.mark.parametrize("wrong", ["messages", "rank"])
def test_what_does_not_fit_a_layout_is_named(wrong: str) -> None:
    def make(world: Group) -> None:
        inside, across = _parts(world, TWO_BY_TWO)
        named = {"rank": world.rank, "messages": inside} if wrong == "messages" else {}
        HierarchicalGroup(inside, across, layout=TWO_BY_TWO, **named)  # type: ignore[arg-type]

    for message in on_threads(lambda world: _refusal(world, make)):
        assert "HierarchicalGroup: messages is" in message or "a layout was given, but no rank" in message


def test_without_messages_a_message_goes_where_both_ends_are() -> None:
    def talk(world: Group) -> list[Any]:
        with _made(world, TWO_BY_TWO) as group:
            got: list[Any] = []
            for a, b in ((0, 1), (0, 2)):  # in a host, in a rail
                t = torch.tensor([10 * a + b])
                if group.rank == a:
                    group.send(t, dst=b)
                elif group.rank == b:
                    place = torch.tensor([-1])
                    got.append((group.recv(place, src=a).source_rank(), place.item()))
            got += [_refusal(world, lambda world: group.send(torch.ones(1), dst=3 - world.rank))]
            got += [_refusal(world, lambda world: group.recv(torch.ones(1)))]
            group.barrier()
            return got

    results = on_threads(talk)
    assert [rank[:-2] for rank in results] == [[], [(0, 1)], [(0, 2)], []]
    for rank in results:
        assert all(
            "there is no group that joins the two. Make the group with discover()" in message for message in rank[-2:]
        )


def test_without_messages_a_sub_group_stays_in_its_host() -> None:
    def split(world: Group) -> tuple[float, str]:
        with _made(world, TWO_BY_TWO) as group:
            sub = group.split(world.rank // 2)
            assert sub is not None
            t = torch.ones(1)
            sub.all_reduce(t)
            sub.close()
            return t.item(), _refusal(world, lambda world: group.split(0))

    for total, message in on_threads(split):
        assert total == 2
        assert "it spans hosts, and there is no group of all ranks to make its parts of" in message


def test_a_rank_that_does_not_come_to_the_discovery_is_named() -> None:
    with pytest.raises(CollectiveTimeout, match=r"ranks \[1, 2\] did not arrive within 0.2 s") as caught:
        HierarchicalGroup.discover(HashStore(), 0, 3, timeout=0.2)
    assert (caught.value.joined, caught.value.missing) == ((0,), (1, 2))


def test_only_ranks_that_a_rank_waits_for_are_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for 1, which waits for 2. Rank 3 waits for 4, which has not reported yet: none of rank 0's business."""
    monkeypatch.setattr(rendezvous, "_GRACE", 0.1)
    meeting = rendezvous.Rendezvous(HashStore(), 0, 5, timeout=1.0, who="making it")
    for rank, missing in {1: [2], 3: [4]}.items():
        meeting.store.set(meeting.key(f"late/{rank}"), str(missing))
    assert meeting.missing_of_all([1]) == [2]


def test_a_part_that_cannot_be_made_closes_the_others() -> None:
    made: list[ThreadGroup] = []

    def inside(store: Any, rank: int, size: int, **named: Any) -> Group:
        made.extend(ThreadGroup.world(1))
        return made[-1]

    def across(store: Any, rank: int, size: int, **named: Any) -> Group:
        raise GroupError("there is no wire")

    def discover(rank: int) -> None:
        with pytest.raises(GroupError, match="there is no wire"):
            HierarchicalGroup.discover(store, rank, 2, inside=inside, across=across, host=str(rank), timeout=10)

    store = HashStore()
    run_threads(threading.Thread(target=discover, args=(rank,)) for rank in range(2))
    assert [group.closed for group in made] == [True, True]


# -- failures ----------------------------------------------------------------------------------------------------------------


def test_without_a_store_the_lost_rank_is_named_where_it_is_known() -> None:
    gone = threading.Barrier(4)

    def lose(world: Group) -> tuple[str, int | None, str]:
        group = _made(world, TWO_BY_TWO)
        try:
            group.barrier()
            if world.rank == 3:
                group.fail(PeerLost("rank 2 has vanished", rank=2))  # as if a part had found out
                gone.wait(100)
                return "", None, ""
            gone.wait(100)
            try:
                group.all_reduce(torch.ones(5000))
            except GroupError as error:
                return type(error).__name__, getattr(error, "rank", None), str(error)
            return "finished", None, ""
        finally:
            group.close()

    results = on_threads(lose)
    kind, rank, text = results[2]  # shares the host of the one that knows
    assert (kind, rank) == ("PeerLost", 2)
    for kind, rank, text in results[:2]:
        assert (kind, rank) in {("PeerLost", 2), ("GroupAborted", None)}
        assert "rank 2" in text


def test_sizes_that_do_not_agree_in_an_all_to_all() -> None:
    def exchange(world: Group) -> str:
        with _made(world, TWO_BY_TWO) as group:
            outputs = [torch.zeros(2 if (world.rank, i) == (0, 3) else 1) for i in range(4)]
            try:
                group.all_to_all(outputs, [torch.ones(1) for _ in range(4)])
            except CollectiveMismatch as error:
                return str(error)
            return "well"

    results = on_threads(exchange)
    assert "1 elements from rank 3 where there is room for 2" in results[0]


def test_a_lost_peer_stays_lost() -> None:
    (world,) = ThreadGroup.world(1)
    with HierarchicalGroup(world) as group:
        group.fail(PeerLost("it is gone", rank=0))
        with pytest.raises(PeerLost, match="it is gone"):
            group.recover()

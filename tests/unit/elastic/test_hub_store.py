"""The store in the hub where members on several hosts meet."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from gradwire.elasticity.hub import Hub, HubClient
from gradwire.elasticity.view_groups import HubStore
from gradwire.errors import GroupError
from gradwire.groups.c10d import C10dGroup

KEY = b"secret"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    made = Hub(tmp_path / "hub", key=KEY)
    yield made
    made.close()


def client(hub: Hub) -> HubClient:
    return HubClient(hub.address, key=KEY)


def test_members_find_what_the_others_have_set(hub: Hub) -> None:
    mine = HubStore(client(hub))
    other = HubStore(client(hub), mine.name)
    theirs = PrefixStore("a", other)  # which does not keep it
    theirs.set("bytes", bytes(range(256)))
    assert mine.get("a/bytes") == bytes(range(256))
    assert (mine.add("count", 2), mine.add("count", -3), mine.add("count", 0)) == (2, -1, -1)
    requests = [(mine.name, "add", ["count"], "5", "a request that is repeated")] * 2
    assert [client(hub).call("store", *request) for request in requests] == ["4", "4"]
    assert mine.compare_set("x", "", "1") == b"1"
    assert mine.compare_set("x", "2", "3") == b"1"
    assert mine.compare_set("x", "1", "3") == b"3" == mine.get("x")
    assert mine.check(["x", "count"])
    assert not mine.check(["x", "y"])
    with pytest.raises(GroupError, match=r"read \['y'\] in store"):
        mine.get("y")
    mine.close()
    with pytest.raises(GroupError, match="no such store"):
        mine.set("y", "1")
    assert other.get("x") == b"3"


def test_a_store_is_gone_with_the_hub_and_when_members_have_changed_often(hub: Hub, tmp_path: Path) -> None:
    first = HubStore(client(hub))
    later = [HubStore(client(hub)) for _ in range(4)]
    with pytest.raises(GroupError, match="no such store"):
        first.set("x", "1")
    later[0].set("x", "1")
    hub.close()
    again = Hub(tmp_path / "hub", key=KEY, address=hub.address)
    with pytest.raises(GroupError, match="no such store"):
        later[0].check(["x"])
    again.close()


def test_a_gloo_group_meets_in_it(hub: Hub) -> None:
    first = HubStore(client(hub))
    stores = [first, HubStore(client(hub), first.name)]

    def rank(number: int) -> float:
        with C10dGroup.gloo(stores[number], number, 2, timeout=60.0) as group:
            total = torch.full((3,), number + 1.0)
            group.all_reduce(total)
            return total.sum().item()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [9.0, 9.0]

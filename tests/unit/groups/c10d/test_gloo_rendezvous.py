"""Where gloo listens, and the errors of a rendezvous that fails."""

import json
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradwire.errors import CollectiveTimeout, GroupError
from gradwire.groups import C10dGroup
from gradwire.groups.c10d.own_engines import _choose, _ways
from gradwire.groups.store.rendezvous import MemberProcess, host_store


def test_on_one_host_ranks_stay_on_the_loopback_address() -> None:
    known = [("127.0.0.1", "127.0.0.1")] * 2
    assert [_choose(rank, known) for rank in range(2)] == ["127.0.0.1"] * 2


def test_the_stores_host_listens_where_others_have_found_the_store() -> None:
    """Its own name resolves to 127.0.1.1 there."""
    known = [("127.0.0.1", "127.0.1.1"), ("10.0.0.2", "10.0.0.1"), ("127.0.0.1", "127.0.1.1")]
    assert [_choose(rank, known) for rank in range(3)] == ["10.0.0.1", "10.0.0.2", "10.0.0.1"]


def test_without_tcp_gloo_chooses() -> None:
    assert _ways(dist.HashStore()) == ("", "")
    assert _choose(0, [("", "")]) == ""


def test_the_way_to_a_store_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    store = host_store()
    assert _ways(dist.PrefixStore("p", store)) == ("127.0.0.1", "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert _ways(store) == ("", "")


def arrive(store: dist.Store, rank: int, address: str = "") -> None:
    """What another rank writes into the store."""
    store.set(f"gloo/process/{rank}", json.dumps(asdict(MemberProcess.current())))
    store.set(f"gloo/addresses/{rank}", json.dumps([address, address]))


def test_who_has_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    arrive(store, 2)
    with pytest.raises(
        CollectiveTimeout, match=r"gloo group on rank 0 of 3: ranks \[1\] did not arrive within 0.5 s"
    ) as caught:
        C10dGroup.gloo(store, 0, 3, timeout=0.5)
    assert caught.value.missing == (1,)


def test_ranks_that_cannot_be_connected_are_named_with_their_addresses() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    # Rank 1 has come, from an address of another network, and gloo never connects to it.
    arrive(store, 1, address="10.255.255.1")
    with pytest.raises(GroupError, match="all ranks have arrived, but gloo could not connect them") as caught:
        C10dGroup.gloo(store, 0, 2, timeout=0.5)
    assert "{0: \"what its host's name resolves to\", 1: '10.255.255.1'}" in str(caught.value)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value)


def test_ranks_of_different_versions_are_named() -> None:
    store = dist.HashStore()
    arrive(store, 1)
    other = replace(MemberProcess.current(), version="gradwire 0.0.7 (protocol 0, records 1)")
    store.set("gloo/process/2", json.dumps(asdict(other)))
    with pytest.raises(GroupError, match=r"ranks \[0, 1\]: gradwire .*; ranks \[2\]: gradwire 0.0.7"):
        C10dGroup.gloo(store, 0, 3, timeout=60)

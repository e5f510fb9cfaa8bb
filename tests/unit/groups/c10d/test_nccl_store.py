"""The store that NCCL's threads call."""

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from gradwire.groups.c10d.own_engines import _without_interpreter
from gradwire.groups.store.private_store import PrivateStore
from gradwire.testing.leftovers import open_descriptors


def test_ranks_of_a_private_store_get_one_that_needs_no_interpreter() -> None:
    with PrivateStore.create() as private:
        found = [_without_interpreter(dist.PrefixStore("group", private), rank, 20.0) for rank in range(2)]
        stores, descriptors = zip(*found, strict=True)
        assert all(type(store) is dist.FileStore for store in stores)
        stores[0].set("key", "value")
        assert stores[1].get("key") == b"value"
        assert [stores[rank].add("count", 1) for rank in (0, 1, 0)] == [1, 2, 3]
        other, fd = _without_interpreter(dist.PrefixStore("another group", private), 0, 20.0)
        assert not other.check(["key"])
        for descriptor in (*descriptors, fd):
            os.close(descriptor)


def test_any_other_store_is_used_as_it_is() -> None:
    store = dist.HashStore()
    assert _without_interpreter(store, 0, 20.0) == (store, None)


def test_nothing_is_left_open_when_the_private_store_is_closed() -> None:
    with PrivateStore.create() as private:
        private.close()
        before = open_descriptors()
        with pytest.raises(RuntimeError, match="is closed"):
            _without_interpreter(private, 0, 20.0)
        assert open_descriptors() == before


def test_nothing_is_left_open_when_rank_0_does_not_come() -> None:
    with PrivateStore.create() as private:
        private.set_timeout(timedelta(seconds=0.1))
        before = open_descriptors()
        with pytest.raises(RuntimeError, match="gradwire/nccl"):
            _without_interpreter(private, 1, 20.0)
        assert open_descriptors() == before

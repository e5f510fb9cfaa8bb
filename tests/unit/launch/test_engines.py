"""Which kind of group a world gets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gradwire.errors import UsageError
from gradwire.launch import Launcher, World
from gradwire.launch.engines import BUILDERS, choose
from gradwire.launch.entry import _agree

ALL = ("threads", "gloo", "nccl", "shared_memory", "hierarchical")


def world(size: int, local_size: int | None) -> World:
    return World(0, size, Launcher.TORCHRUN, local_size=local_size)


@pytest.mark.parametrize(
    ("size", "local_size", "everything", "without"),
    [
        (1, 1, "threads", "threads"),
        (1, None, "threads", "threads"),
        (4, 4, "shared_memory", "gloo"),
        (4, 2, "hierarchical", "gloo"),
        (4, 1, "gloo", "gloo"),
        (4, None, "gloo", "gloo"),
    ],
)
def test_auto_takes_the_best_that_is_there(size, local_size, everything, without):
    assert choose("auto", world(size, local_size), ALL) == everything
    assert choose("auto", world(size, local_size), ("threads", "gloo", "nccl")) == without


def test_a_kind_that_is_asked_for_is_taken():
    assert choose("nccl", world(4, 4)) == "nccl"


def test_a_kind_that_is_not_there_is_an_error_with_those_that_are():
    with pytest.raises(
        UsageError,
        match=r"kind='pigeons'\): there is no such kind. Known kinds: auto, threads, shared_memory, hierarchical, gloo, nccl, mpi",
    ):
        choose("pigeons", world(4, 4))


def test_processes_are_no_threads():
    with pytest.raises(
        UsageError, match="cannot be threads of one. Choose another kind: shared_memory, hierarchical, gloo, nccl, mpi"
    ):
        BUILDERS["threads"](HashStore(), world(2, 2), timeout=1, name="x")


@pytest.mark.parametrize(
    ("devices", "asked", "kind"),
    [
        ([2, 2], "auto", "nccl"),
        ([4, 4], "auto", "nccl"),
        ([2, 1], "auto", "shared_memory"),  # decided by all ranks together
        ([0, 0], "auto", "shared_memory"),
        ([2, 2], "gloo", "gloo"),
    ],
)
def test_nccl_is_chosen_where_every_rank_has_a_gpu(monkeypatch, devices, asked, kind):
    store = HashStore()
    visible = threading.local()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible.devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible.devices)

    def rank_main(rank: int) -> str:
        visible.devices = devices[rank]
        return _agree(store, World(rank, 2, Launcher.TORCHRUN, local_size=2), asked, 60.0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_main, range(2))) == [kind, kind]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_without_a_device_is_a_usage_error():
    with pytest.raises(UsageError, match="there is no CUDA device here"):
        BUILDERS["nccl"](HashStore(), world(1, 1), timeout=1, name="x")

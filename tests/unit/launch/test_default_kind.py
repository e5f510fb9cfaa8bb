"""Which kind of group a world gets."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gradwire.groups.kinds import default_kind
from gradwire.launch import Launcher, World
from gradwire.launch.entry import _agree


@pytest.mark.parametrize(
    ("size", "local_size", "kind"),
    [
        (1, 1, "threads"),
        (1, None, "threads"),
        (4, 4, "shared_memory"),
        (4, 2, "hierarchical"),
        (4, 1, "gloo"),
        (4, None, "gloo"),
    ],
)
def test_the_kind_that_suits_the_hosts_is_chosen(size: int, local_size: int | None, kind: str) -> None:
    assert default_kind(size, local_size) == kind


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

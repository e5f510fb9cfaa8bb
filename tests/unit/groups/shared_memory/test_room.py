"""Too little shared memory, as in a container with docker's 64 MiB of /dev/shm: slower, with one warning, and correct."""

from __future__ import annotations

import errno
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.groups import SharedMemoryGroup
from gradwire.groups.shared_memory import board, group
from gradwire.groups.shared_memory.board import CHUNK, SMALLEST_CHUNK, SegmentPlan
from gradwire.groups.shared_memory.group import ROOM, ROOM_PER_RANK

MIB = 1 << 20


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_WARNED", set())


@pytest.fixture
def dockers_tmpfs(tmp_path: Path) -> Iterator[str]:
    """64 MiB, really."""
    place = tmp_path / "tmpfs"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip(f"may not mount a tmpfs: {mounted.stderr.strip() if mounted else 'not root'}")
    yield str(place)
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_staging_takes_half_of_what_there_is() -> None:
    assert SegmentPlan.fitting(2, 1 << 40).chunk == CHUNK
    assert SegmentPlan.fitting(8, 64 * MIB).chunk == CHUNK
    for ranks in (16, 22, 64):
        plan = SegmentPlan.fitting(ranks, 64 * MIB)
        assert SMALLEST_CHUNK <= plan.chunk < CHUNK
        assert plan.heaps <= 32 * MIB
    assert SegmentPlan.fitting(2, 0).chunk == SMALLEST_CHUNK
    assert SegmentPlan.fitting(1000, 0).chunk // 1000 >= 64  # a part of every rank fits into a buffer


def test_a_model_of_300_million_parameters_fits_at_64_ranks() -> None:
    assert SegmentPlan(64, max(ROOM, 64 * ROOM_PER_RANK)).heap_stride > 8 * 300e6 * 4


def test_what_does_not_fit_is_ordinary_memory_with_one_warning(
    world: Any, everywhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank only: ranks need not agree."""
    groups = world(2)
    kept = [group.allocate(10_000).fill_(1.0) for group in groups]

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.warns(
        RuntimeWarning, match=r"no room for .*heap of rank 0.*GRADWIRE_SHM_DIRECTORY.*ordinary memory"
    ) as seen:
        big = [groups[0].allocate(3_000_000), groups[0].allocate(4_000_000)]
    assert len([w for w in seen if w.category is RuntimeWarning]) == 1
    monkeypatch.undo()
    tensors = [big[0].fill_(1.0), groups[1].allocate(3_000_000).fill_(2.0)]
    assert [group.in_heap(t) for group, t in zip(groups, tensors, strict=True)] == [False, True]
    everywhere(groups, lambda group: group.all_reduce(tensors[group.rank]))
    everywhere(groups, lambda group: group.all_reduce(kept[group.rank]))
    assert all(t.eq(3).all() for t in tensors)
    assert all(t.eq(2).all() for t in kept)


@pytest.mark.parametrize("chunk", [SMALLEST_CHUNK, SMALLEST_CHUNK * 2])
def test_collectives_with_small_staging_buffers(
    world: Any, everywhere: Any, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(board, "CHUNK", chunk)
    groups = world(3)
    assert all(group._board.plan.chunk == chunk for group in groups)

    def moves(group: Any) -> bool:
        t = torch.arange(100_003, dtype=torch.float64) * (group.rank + 1)
        group.all_reduce(t)
        ok = torch.equal(t, torch.arange(100_003, dtype=torch.float64) * 6)
        mine = torch.full((50_001,), group.rank)
        whole = torch.empty(3 * 50_001, dtype=torch.int64)
        group.all_gather_into_tensor(whole, mine)
        swapped = torch.empty_like(whole)
        group.all_to_all_single(swapped, whole)
        return ok and whole[::50_001].tolist() == [0, 1, 2] and swapped.eq(group.rank).all().item()

    assert everywhere(groups, moves) == [True] * 3


def test_22_ranks_meet_in_64_mib(world: Any, everywhere: Any, dockers_tmpfs: str) -> None:
    groups = world(22, directory=dockers_tmpfs, timeout=60.0)
    t = [torch.full((300_000,), 1.0) for _ in groups]
    everywhere(groups, lambda group: group.all_reduce(t[group.rank]))
    assert all(x.eq(22).all() for x in t)
    halves = everywhere(groups, lambda group: group.split(group.rank % 2))
    assert all(isinstance(half, SharedMemoryGroup) for half in halves)
    for half in halves:
        half.close(timeout=1.0)


def test_a_model_of_25_million_parameters_trains_in_64_mib(world: Any, everywhere: Any, dockers_tmpfs: str) -> None:
    groups = world(2, directory=dockers_tmpfs, timeout=60.0)

    def train(group: Any) -> float:
        torch.manual_seed(0)
        model = gw.DistributedDataParallel(
            nn.Sequential(*[nn.Linear(2500, 2500) for _ in range(4)]), process_group=group
        )
        model(torch.full((2, 2500), float(group.rank + 1))).sum().backward()
        return sum(p.grad.double().abs().sum().item() for p in model.parameters() if p.grad is not None)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = everywhere(groups, train)
    assert isinstance(results[0], float), results
    assert results[0] == results[1] > 0
    assert sum("ordinary memory" in str(w.message) for w in seen) == 1

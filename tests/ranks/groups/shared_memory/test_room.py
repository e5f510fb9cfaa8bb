"""Scarce shared memory, as with 64 MiB of /dev/shm in a container: slower, one warning, correct. Copies for a GPU warn once too."""

import errno
import os
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

import gradwire as gw
from gradwire.errors import GroupError
from gradwire.groups import Group, SharedMemoryGroup
from gradwire.groups.shared_memory import board, group, group as module
from gradwire.groups.shared_memory.board import CHUNK, SMALLEST_CHUNK, SegmentPlan
from gradwire.groups.shared_memory.group import ROOM, ROOM_PER_RANK

MIB = 1 << 20


@pytest.fixture(autouse=True)
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_WARNED", set())


def tmpfs(place: Path, size: str) -> Iterator[str]:
    """A file system of that size, really, until the test has ended."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip(f"may not mount a tmpfs: {mounted.stderr.strip() if mounted else 'not root'}")
    yield str(place)
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def dockers_tmpfs(tmp_path: Path) -> Iterator[str]:
    yield from tmpfs(tmp_path / "tmpfs", "64m")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[str]:
    yield from tmpfs(tmp_path / "tmpfs", "16m")


def test_staging_takes_half_of_what_there_is() -> None:
    assert SegmentPlan.fitting(2, 1 << 40, 1 << 40).wide
    for free, room, wide in ((1 << 40, 1 << 40, True), (64 * MIB, 1 << 40, False), (1 << 40, 64 * MIB, False)):
        plan = SegmentPlan.fitting(8, room, free)
        assert (plan.chunk, plan.wide) == (CHUNK, wide)
        assert plan.heaps <= min(free, room) // 2
    for ranks in (16, 22, 64):
        plan = SegmentPlan.fitting(ranks, 1 << 40, 64 * MIB)
        assert SMALLEST_CHUNK <= plan.chunk < CHUNK
        assert plan.heaps <= 32 * MIB
    assert SegmentPlan.fitting(2, 1 << 40, 0).chunk == SMALLEST_CHUNK
    assert SegmentPlan.fitting(1000, 1 << 40, 0).chunk // 1000 >= 64  # a part of every rank fits into a buffer


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


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to run as another user")
def test_another_user_cannot_open_it(pair: list[Any]) -> None:
    """Really another user, with the ticket in hand."""
    script = f"""
        import os
        os.setgid(65534); os.setuid(65534)
        try:
            os.open({pair[1].path!r}, os.O_RDWR)
        except OSError as error:
            print(error.strerror)
    """
    done = subprocess.run(
        [sys.executable, "-S", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "Permission denied\n"


def test_a_full_tmpfs_is_an_error_and_not_a_bus_error(world: Any, everywhere: Any, small_tmpfs: str) -> None:
    groups = world(2, directory=small_tmpfs)
    kept = []
    with pytest.raises(
        GroupError, match=r"no room for .*iB \(heap of rank 0\): .*; .*iB are free where the segment lies"
    ):
        while True:
            kept.append(groups[0]._heap.tensor(200_000, torch.float32).fill_(1.0))
    assert 1 <= len(kept) < 20
    # What there was can still be used, and what is given back too.
    t = [kept[0], torch.ones(200_000)]
    everywhere(groups, lambda group: group.all_reduce(t[group.rank]))
    assert all(x.eq(2).all() for x in t)
    kept.clear()
    assert groups[0].allocate(200_000).numel() == 200_000
    # A send needs a copy in the heap; where there is no room for it, it fails, and later ones do not.
    groups[1]._heap._collect()
    kept.append(groups[1].allocate(sum(nbytes for _, nbytes in groups[1]._heap._free) // 4))
    big = torch.ones(4_000_000)
    with pytest.raises(GroupError, match=r"no room for .*heap of rank 1"):
        groups[1].send(big, dst=0)
    got = torch.empty(3)
    receiving = groups[0].recv(got, src=1, async_op=True)
    del kept[-1]
    groups[1].send(torch.ones(3), dst=0)
    receiving.wait()


def test_no_room_for_the_board(small_tmpfs: str, tmp_path: Path) -> None:
    with open(os.path.join(small_tmpfs, "ballast"), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (16 << 20) - (256 << 10))
        store = HashStore()
        with pytest.raises(GroupError, match=r"no room for .* \(board and staging buffers\)"):
            SharedMemoryGroup(store, 0, 2, directory=small_tmpfs)
        with pytest.raises(GroupError, match="rank 0 could not make its part of the group: .*no room for"):
            SharedMemoryGroup(store, 1, 2, directory=small_tmpfs)


@pytest.mark.parametrize(
    ("size", "devices", "times"), [(2, ["cpu", "cuda:1", "cuda"], 1), (2, ["meta"], 0), (1, ["cuda"], 0)]
)
def test_one_warning_where_buckets_are_copied(
    world: Any, monkeypatch: pytest.MonkeyPatch, size: int, devices: list[str], times: int
) -> None:
    """Without a GPU: what would allocate on it is replaced."""
    group = world(size)[0]
    monkeypatch.setattr(module, "_WARNED", set())
    monkeypatch.setattr(Group, "allocate", lambda self, numel, **_: torch.empty(numel))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for device in devices:
            group.allocate(4, device=device)
    texts = [str(warning.message) for warning in seen]
    assert len(texts) == times
    for text in texts:
        assert text.startswith("gradients on cuda:1 are copied to the host")
        assert "the 2 ranks" in text
        assert "GPU of its own, and gw.init() takes NCCL" in text

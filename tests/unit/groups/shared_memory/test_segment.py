"""The segment: mode, owner, what is refused, what stays behind (nothing), and missing memory."""

import errno
import json
import mmap
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups import SharedMemoryGroup
from gradwire.groups.shared_memory.board import SegmentPlan
from gradwire.groups.shared_memory.segment import PAGE, Segment, Ticket
from helpers.segments import SIZE, new


@pytest.fixture
def _named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without O_TMPFILE."""
    plain = os.open

    def no_tmpfile(path: Any, flags: int, *how: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return plain(path, flags, *how, **named)

    monkeypatch.setattr(os, "open", no_tmpfile)


@pytest.fixture(params=["nameless", "named"])
def either_way(request: pytest.FixtureRequest) -> str:
    if request.param == "named":
        request.getfixturevalue("_named")
    return str(request.param)


@pytest.mark.usefixtures("either_way")
def test_it_is_in_no_directory_and_nobody_elses(tmp_path: Path) -> None:
    segment, ticket = new(tmp_path)
    status = os.fstat(segment.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert status.st_uid == os.geteuid()
    assert list(tmp_path.iterdir()) == []
    assert ticket.path == f"/proc/{os.getpid()}/fd/{segment.fd}"
    assert not os.get_inheritable(segment.fd)
    segment.close()


@pytest.mark.usefixtures("_named")
def test_where_it_needs_a_name_nobody_can_guess_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path: (names.append(os.path.basename(path)), unlink(path)))
    for _ in range(2):
        new(tmp_path)[0].close()
    assert len(set(names)) == 2
    assert all(len(bytes.fromhex(name.removeprefix("gradwire-"))) == 16 for name in names)


@pytest.mark.usefixtures("_named")
def test_a_world_over_a_named_segment_leaves_no_name(world: Any, everywhere: Any, tmp_path: Path) -> None:
    groups = world(2, directory=str(tmp_path), room=64 << 20)
    assert list(tmp_path.iterdir()) == []
    t = [torch.ones(100_000) for _ in groups]
    everywhere(groups, lambda group: group.all_reduce(t[group.rank]))
    assert all(x.eq(2).all() for x in t)


def test_what_one_writes_the_other_reads(pair: list[Any]) -> None:
    segment, ticket = pair
    twin = Segment.join(ticket)
    segment.reserve(PAGE, 5, what="a word")
    segment.memory[PAGE : PAGE + 5] = b"hello"
    assert twin.memory[PAGE : PAGE + 5] == b"hello"
    assert twin.fd != segment.fd
    twin.close()


# -- what is refused -----------------------------------------------------------------------------------------------------


TAMPERED: dict[str, tuple[Callable[[Segment], Any], Callable[[Ticket], Ticket], str]] = {
    "shrunk": (lambda s: os.ftruncate(s.fd, SIZE // 2), lambda t: t, f"has {SIZE // 2} bytes where {SIZE} were announced"),
    "grown": (lambda s: os.ftruncate(s.fd, SIZE * 2), lambda t: t, f"has {SIZE * 2} bytes where {SIZE} were announced"),
    "another inode": (lambda s: 0, lambda t: replace(t, inode=t.inode + 1), "another file has taken its place"),
    "another device": (lambda s: 0, lambda t: replace(t, device=t.device + 1), "another file has taken its place"),
    "no such file": (lambda s: 0, lambda t: replace(t, path="/nowhere"), "cannot be opened: No such file"),
    "a directory": (lambda s: 0, lambda t: replace(t, path="/"), "cannot be opened: Is a directory"),
    "a process that has ended": (
        lambda s: 0, lambda t: replace(t, path="/proc/2147483646/fd/3"), "The rank that made it has ended",
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", TAMPERED)
def test_a_segment_that_is_not_the_right_one_is_refused(pair: list[Any], how: str) -> None:
    segment, ticket = pair
    act, change, words = TAMPERED[how]
    act(segment)
    with pytest.raises(GroupError) as caught:
        Segment.join(change(ticket))
    assert words in str(caught.value)
    assert "shared memory of 2 ranks" in str(caught.value)


def test_another_users_segment_is_refused(pair: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(GroupError, match="belongs to user .*, this process runs as 12345"):
        Segment.join(pair[1])


def test_mapping_that_fails_in_a_rank_is_reported(pair: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", _no_memory)
    with pytest.raises(GroupError, match=r"cannot be mapped: .*ulimit -v"):
        Segment.join(pair[1])


def _no_memory(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


# -- address space --------------------------------------------------------------------------------------------------------


def test_where_address_space_is_short_it_makes_do_with_less(
    either_way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = mmap.mmap

    def at_most_8_gib(fd: int, nbytes: int, **kwargs: Any) -> Any:
        return _no_memory() if nbytes > 8 << 30 else real(fd, nbytes, **kwargs)

    monkeypatch.setattr(mmap, "mmap", at_most_8_gib)
    segment, ticket = new(tmp_path, nbytes=64 << 30)
    assert segment.nbytes == ticket.nbytes == os.fstat(segment.fd).st_size == 8 << 30
    twin = Segment.join(ticket)  # it has kept its name, where it has one
    twin.close()
    segment.close()
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_address_space_at_all(
    either_way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mmap, "mmap", _no_memory)
    with pytest.raises(GroupError, match=r"cannot map .* MiB of .*: Cannot allocate memory\. Raise the limits"):
        new(tmp_path, nbytes=4 << 30)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_may_not_be_so_large(either_way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def too_large(fd: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", too_large)
    with pytest.raises(GroupError, match="File too large.*ulimit -f"):
        new(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_room_that_is_not_enough(world: Any) -> None:
    least = SegmentPlan(2, 0, wide=False).heaps + 2 * (1 << 20)
    for wrong in (least - 1, "2G", 1e10, 1 << 70):
        with pytest.raises(UsageError, match=re.escape(f"room={wrong!r} is not enough, or too much")) as caught:
            SharedMemoryGroup(HashStore(), 0, 2, room=wrong)
        assert f"pass {least} bytes or more" in str(caught.value)
    groups = world(2, room=least)
    with pytest.raises(GroupError, match=r"address space for \d+ bytes only.*more room="):
        groups[0]._heap.tensor(10_000_000, torch.float32)
    assert groups[0].allocate(10_000).numel() == 10_000


# -- memory ----------------------------------------------------------------------------------------------------------------


def no_space(fd: int, offset: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_memory_says_how_much_was_asked_for_and_what_is_free(
    pair: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    with pytest.raises(GroupError) as caught:
        pair[0].reserve(PAGE, 512 << 10, what="heap of rank 1")
    text = str(caught.value)
    assert "no room for 0.5 MiB (heap of rank 1): No space left on device" in text
    assert "iB are free where the segment lies" in text
    assert "--shm-size" in text


def test_other_errors_of_the_system_stay_what_they_are(pair: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output error"):
        pair[0].reserve(PAGE, 1, what="anything")


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory. Give a directory= that exists"):
        new(tmp_path / "missing")
    store = HashStore()
    with pytest.raises(UsageError, match="No such file"):
        SharedMemoryGroup(store, 0, 2, directory=str(tmp_path / "missing"))
    with pytest.raises(GroupError, match="rank 0 could not make its part of the group: .*No such file"):
        SharedMemoryGroup(store, 1, 2)


# -- ranks that do not fit ---------------------------------------------------------------------------------------------------


def test_two_groups_over_one_store_and_two_jobs_of_the_same_name_never_meet(world: Any, everywhere: Any) -> None:
    store = HashStore()
    worlds = [world(2, store=store), world(2, store=store), world(2, name="job"), world(2, name="job")]
    assert len({(group._segment.fd, os.fstat(group._segment.fd).st_ino) for groups in worlds for group in groups}) == 8
    assert len({os.fstat(group._segment.fd).st_ino for groups in worlds for group in groups}) == 4
    for number, groups in enumerate(worlds):
        t = [torch.full((100_000,), float(number)) for _ in groups]
        everywhere(groups, lambda group: group.all_reduce(t[group.rank]))
        assert all(x.eq(2 * number).all() for x in t)


def refused(ticket_changes: dict[str, Any] | None = None, *, size: int = 2) -> list[BaseException]:
    """Rank 0 as always; rank 1 gets a ticket that was changed on the way, or requests another size."""
    store = HashStore()
    errors: list[BaseException] = []

    def rank_0() -> None:
        try:
            SharedMemoryGroup(store, 0, 2, timeout=10)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=rank_0)
    thread.start()
    key = "gradwire/shared-memory/1/ticket"
    store.wait([key])
    announced = json.loads(store.get(key))
    store.set(key, json.dumps(announced | (ticket_changes or {})))
    with pytest.raises(GroupError) as caught:
        SharedMemoryGroup(store, 1, size, timeout=10)
    thread.join(100)
    assert not thread.is_alive()
    return [*errors, caught.value]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host": "elsewhere"}, "rank 0 runs on another host or in another container"),
        ({"inode": 1}, "another file has taken its place"),
        ({"nbytes": 1 << 30}, "were announced"),
    ],
)
def test_a_rank_that_cannot_join_fails_the_others_at_once(changes: dict[str, Any], words: str) -> None:
    errors = refused(changes)
    assert [type(error) for error in errors] == [GroupError] * 2
    assert all(words in str(error) for error in errors)
    assert "rank 1 could not make its part of the group: " in str(errors[0])


def test_ranks_of_different_sizes() -> None:
    errors = refused(size=3)
    assert all("rank 0 has made a segment for 2 ranks. Give all ranks the same size." in str(e) for e in errors)


def test_rank_0_that_never_comes_and_others_that_never_come() -> None:
    with pytest.raises(CollectiveTimeout, match=r"ranks \[0\] did not arrive within") as caught:
        SharedMemoryGroup(HashStore(), 1, 2, timeout=0.2)
    assert caught.value.missing == (0,)
    with pytest.raises(CollectiveTimeout, match=r"ranks \[1, 2\] did not arrive within") as caught:
        SharedMemoryGroup(HashStore(), 0, 3, timeout=0.2)
    assert caught.value.missing == (1, 2)


def test_an_unknown_way_of_waiting_is_refused_before_anybody_is_met() -> None:
    store = HashStore()
    with pytest.raises(UsageError, match="waiting='hope' is unknown. Choose auto, futex or polling"):
        SharedMemoryGroup(store, 0, 2, waiting="hope")  # type: ignore[arg-type]
    assert store.num_keys() <= 1


def test_a_ticket_travels_as_json() -> None:
    ticket = Ticket("/proc/1/fd/3", 5, 7, "ab", 9, 2, "host")
    assert Ticket(**json.loads(json.dumps(asdict(ticket)))) == ticket

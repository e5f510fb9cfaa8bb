"""Fence, wait queue, futex and polling: no wake-up is lost, and every sleep ends."""

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire.groups.shared_memory.sync import Fence, Futex, Polling, WaitQueue
from gradwire.runtime.host import usable_cores
from helpers.wait_queues import Make, futex


def timed(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


# -- the fence ---------------------------------------------------------------------------------------------------------------


def test_a_fence_releases_before_it_acquires_and_can_be_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Lock:
        def acquire(self) -> None:
            calls.append("acquire")

        def release(self) -> None:
            calls.append("release")

    monkeypatch.setattr(threading, "Lock", Lock)
    fence = Fence()
    assert calls == ["acquire"]
    fence()
    fence()
    assert calls[1:] == ["release", "acquire"] * 2


def test_a_fence_never_waits() -> None:
    fence = Fence()
    assert timed(lambda: [fence() for _ in range(1000)]) < 30


# -- sleeping ----------------------------------------------------------------------------------------------------------------


def test_a_sleep_ends_by_itself(make: Make, memory: mmap.mmap) -> None:
    memory[64] = 1
    seconds = timed(lambda: make(memory).sleep(64, 0.1))
    assert 0.09 < seconds < 30


def test_sleep_returns_at_once_unless_the_flag_is_set(make: Make, memory: mmap.mmap) -> None:
    assert timed(lambda: make(memory).sleep(64, 90)) < 30


def test_waking_nobody_is_harmless(make: Make, memory: mmap.mmap) -> None:
    before = bytes(memory)
    make(memory).wake(0)
    assert bytes(memory) == before


def test_a_sleeper_is_woken(make: Make, memory: mmap.mmap) -> None:
    sleep = make(memory)
    memory[0] = 1
    thread = threading.Thread(target=sleep.sleep, args=(0, 90))

    def wake_until_it_does() -> None:
        thread.start()
        while thread.is_alive():
            memory[0] = 0
            sleep.wake(0)
            thread.join(0.01)

    assert timed(wake_until_it_does) < 30


def test_futex_raises_what_it_does_not_expect(memory: mmap.mmap) -> None:
    with pytest.raises(OSError, match="futex: ") as caught:
        futex(memory).sleep(1, 0.1)  # not aligned
    assert caught.value.errno == errno.EINVAL


def test_a_signal_does_not_break_a_sleep(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = futex(memory)

    def interrupted(*args: Any) -> int:
        ctypes.set_errno(errno.EINTR)
        return -1

    monkeypatch.setattr(sleep, "_call", interrupted)
    assert timed(lambda: sleep.sleep(0, 90)) < 30


def test_where_there_is_no_futex(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Futex.available()
    with monkeypatch.context() as m:
        m.setattr(sys, "platform", "darwin")
        assert not Futex.available()
    with monkeypatch.context() as m:
        m.setattr(platform, "machine", lambda: "vax")
        assert not Futex.available()
    with monkeypatch.context() as m:  # as where a sandbox forbids it
        m.setattr(Futex, "_call", lambda self, *args: ctypes.set_errno(errno.EPERM) or -1)
        assert not Futex.available()


def test_without_a_futex_a_group_polls(world: Any, everywhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Futex, "available", staticmethod(lambda: False))
    groups = world(2)
    assert all(isinstance(group._board.wait_queue._sleep, Polling) for group in groups)
    assert [type(result).__name__ for result in everywhere(groups, lambda group: group.barrier())] == ["Work"] * 2


# -- the wait queue ------------------------------------------------------------------------------------------------------------


def queues(memory: mmap.mmap, make: Make) -> list[WaitQueue]:
    return [WaitQueue(memoryview(memory), 128, rank, 2, make(memory)) for rank in range(2)]


def test_a_rank_that_is_ready_does_not_sleep_and_clears_its_flag(make: Make, memory: mmap.mmap) -> None:
    queue = queues(memory, make)[0]
    seen = []

    def ready() -> bool:
        seen.append(memory[128])
        return True

    assert timed(lambda: queue.sleep(ready, Fence(), 90)) < 30
    assert seen == [1]
    assert memory[128] == 0


def test_one_flag_is_cleared_and_no_other(make: Make, memory: mmap.mmap) -> None:
    first, second = queues(memory, make)
    memory[128], memory[128 + 64] = 1, 1
    first.wake_all()
    assert (memory[128], memory[128 + 64]) == (1, 0)
    second.wake(0)
    assert (memory[128], memory[128 + 64]) == (0, 0)


def test_a_spurious_wake_is_only_an_early_look(make: Make, memory: mmap.mmap) -> None:
    """`sleep` returns, the caller looks again and sleeps again."""
    queue = queues(memory, make)[0]
    looks = []
    done = threading.Event()

    def sleeper() -> None:
        while not done.is_set():
            looks.append(1)
            queue.sleep(done.is_set, Fence(), 0.05)

    thread = threading.Thread(target=sleeper)
    thread.start()
    other = queues(memory, make)[1]
    for _ in range(20):
        other.wake(0)
        time.sleep(0.001)
    done.set()
    other.wake(0)
    thread.join(60)
    assert not thread.is_alive()
    assert looks


# -- how often to look ---------------------------------------------------------------------------------------------------------


def test_cores_without_a_quota() -> None:
    assert usable_cores("/nowhere") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu.max": "garbage"}, None),
        ({}, None),
    ],
)
def test_cores_are_limited_by_the_containers_quota(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    all_cores = len(os.sched_getaffinity(0))
    assert usable_cores(str(tmp_path)) == (all_cores if most is None else min(all_cores, most))

"""Waiting for other processes, with futexes and by polling."""

import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from gradwire.groups import Group, SharedMemoryGroup
from gradwire.groups.shared_memory.sync import Fence, WaitQueue
from gradwire.testing import check_group, default_pool
from gradwire.testing.pool.protocol import GroupJob
from helpers.wait_queues import Make

ROUNDS = 10_000


def _ping_pong(memory: mmap.mmap, rank: int, make: Make) -> tuple[float, int]:
    """Two processes count in turn and sleep for long in between: a lost wake-up costs a minute. The longest wait, and sleeps."""
    words = memoryview(memory)[:128].cast("Q")
    queue, fence = WaitQueue(memoryview(memory), 128, rank, 2, make(memory)), Fence()
    longest, sleeps = 0.0, 0
    for turn in range(ROUNDS):

        def ready(turn: int = turn) -> bool:
            return words[8 * (1 - rank)] >= turn + (rank == 1)

        began = time.perf_counter()
        while not ready():
            sleeps += 1
            queue.sleep(ready, fence, 60.0)
            assert time.perf_counter() - began < 100
        longest = max(longest, time.perf_counter() - began)
        words[8 * rank] = turn + 1
        fence()
        queue.wake_all()
    return longest, sleeps


def test_no_wake_up_is_lost_between_processes(make: Make, memory: mmap.mmap) -> None:
    """No spinning: both sleep at nearly every turn."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            longest, sleeps = _ping_pong(memory, 1, make)
            os.write(write, f"{longest} {sleeps}".encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    longest, sleeps = _ping_pong(memory, 0, make)
    with os.fdopen(read) as file:
        theirs = file.read().split()
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert sleeps > ROUNDS / 10  # else nothing was tested
    assert longest < 30, "a sleep ended by its limit: a wake-up was lost"
    assert float(theirs[0]) < 30


def _polling_group(store: Any, rank: int, size: int, *, timeout: float, name: str) -> Group:
    return SharedMemoryGroup(store, rank, size, timeout=timeout, name=name, waiting="polling")


def _polling_ranks(fn: Callable[[Group], Any]) -> list[Any]:
    outcomes = default_pool().run(GroupJob(fn, _polling_group), 2)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def test_polling_passes_the_suite() -> None:
    """A part of it: what waits, wakes and goes wrong."""
    only = ["all_reduce_sizes", "all_to_all", "barrier", "send_recv", "many_in_flight", "deadline", "abort"]
    assert set(check_group(_polling_ranks, only=only).ran) == set(only)

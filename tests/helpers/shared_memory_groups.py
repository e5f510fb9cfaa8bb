"""Groups over shared memory whose ranks are threads of the test: every part can be reached, and replaced."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from gradwire.groups import SharedMemoryGroup
from helpers.threads import run_threads

World = Callable[..., list[SharedMemoryGroup]]


def on_all(groups: list[SharedMemoryGroup], fn: Callable[[SharedMemoryGroup], Any]) -> list[Any]:
    """What `fn(group)` returns, or the exception it raised, for each rank; all at once, in a thread each."""
    results: list[Any] = [None] * len(groups)

    def one(rank: int) -> None:
        try:
            results[rank] = fn(groups[rank])
        except BaseException as error:
            results[rank] = error

    run_threads(threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(len(groups)))
    return results


@pytest.fixture
def world() -> Iterator[World]:
    """`world(size, **options)` makes groups that meet in a separate store; they are closed at the end."""
    made: list[SharedMemoryGroup] = []

    def make(size: int, **options: Any) -> list[SharedMemoryGroup]:
        store = options.pop("store", None) or HashStore()
        options = {"timeout": 60.0, **options}
        with ThreadPoolExecutor(size) as pool:
            groups = list(pool.map(lambda rank: SharedMemoryGroup(store, rank, size, **options), range(size)))
        made.extend(groups)
        return groups

    yield make
    for group in made:
        if not group.closed:
            group.close(timeout=1.0)
    made.clear()  # pytest keeps the fixture's value until after the look for leftovers


@pytest.fixture
def everywhere() -> Callable[..., list[Any]]:
    """`everywhere(groups, fn)`: `fn(group)` on all ranks at once."""
    return on_all

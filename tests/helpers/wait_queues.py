"""Both ways to sleep until another process wakes this one, and memory to do it in. A directory's conftest imports the fixtures."""

import ctypes
import mmap
from collections.abc import Callable

import pytest

from gradwire.groups.shared_memory.sync import Futex, Polling, Sleep

Make = Callable[[mmap.mmap], Sleep]


def futex(memory: mmap.mmap) -> Futex:
    return Futex(ctypes.addressof(ctypes.c_char.from_buffer(memory)))


def polling(memory: mmap.mmap) -> Polling:
    return Polling(memoryview(memory))


WAYS: dict[str, Make] = {"futex": futex, "polling": polling}


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, 4096)


@pytest.fixture(params=WAYS)
def make(request: pytest.FixtureRequest) -> Make:
    return WAYS[request.param]

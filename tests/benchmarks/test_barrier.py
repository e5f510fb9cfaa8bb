"""The barrier between turns, with threads for ranks."""

from __future__ import annotations

import threading

import pytest

from benchmarks.barrier import Barrier
from gradwire.errors import CollectiveTimeout


@pytest.fixture
def path(tmp_path):
    Barrier.prepare(tmp_path / "barrier", size=3)
    return tmp_path / "barrier"


def test_nobody_leaves_before_all_have_come(path):
    here, seen, lock = [0] * 50, [], threading.Lock()

    def rank(number: int) -> None:
        barrier = Barrier(path, rank=number, size=3, timeout=20.0)
        for turn in range(50):
            with lock:
                here[turn] += 1
            barrier.wait()
            with lock:
                seen.append(here[turn])
        barrier.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert seen == [3] * 150


def test_who_does_not_come_is_named(path):
    barriers = [Barrier(path, rank=rank, size=3, timeout=0.05) for rank in (0, 2)]
    for barrier in barriers:
        with pytest.raises(
            CollectiveTimeout, match=r"barrier 1 of the benchmark on rank . of 3: ranks \[.*1.*\] did not arrive"
        ):
            barrier.wait()
        barrier.close()


def test_the_missing_are_an_attribute(path):
    barrier = Barrier(path, rank=1, size=3, timeout=0.01)
    with pytest.raises(CollectiveTimeout) as caught:
        barrier.wait()
    assert (caught.value.joined, caught.value.missing) == ((1,), (0, 2))
    barrier.close()

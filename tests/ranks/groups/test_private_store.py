"""`PrivateStore` with writers that are processes, fork or are killed."""

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed import DistStoreError

from gradwire.errors import GroupError
from gradwire.groups import C10dGroup, SharedMemoryGroup
from gradwire.groups.store import private_store
from gradwire.groups.store.private_store import PrivateStore
from helpers.threads import run_threads
from helpers.warm_python import WarmPython


@pytest.fixture
def store() -> Iterator[PrivateStore]:
    with PrivateStore.create() as made:
        yield made


@pytest.mark.parametrize("make", [C10dGroup.gloo, SharedMemoryGroup])
def test_groups_meet_in_it(make: Callable[..., C10dGroup], store: PrivateStore, warm_python: WarmPython) -> None:
    """Rank 1 in a process of its own."""
    program = (
        "import sys, torch; from gradwire.groups import C10dGroup, SharedMemoryGroup;"
        "from gradwire.groups.store.private_store import PrivateStore;"
        f"group = {make.__qualname__}(PrivateStore.open(sys.argv[1]), 1, 2, timeout=60);"
        "t = torch.ones(2); group.all_reduce(t); part = group.split(0); part.all_reduce(t); print(t.tolist()); group.close()"
    )
    rank_1 = warm_python.start(program, store.name, capture=True)
    try:
        group = make(store, 0, 2, timeout=60)
        t = torch.ones(2)
        group.all_reduce(t)
        part = group.split(0)
        part.all_reduce(t)
        out, _ = rank_1.communicate(timeout=300)
        part.close()
        group.close()
    finally:
        rank_1.kill()
        rank_1.communicate()
    assert (out, t.tolist()) == ("[4.0, 4.0]\n", [4.0, 4.0])


def test_the_end_of_its_maker_takes_nothing_away(warm_python: WarmPython) -> None:
    program = (
        "import sys; from gradwire.groups.store.private_store import PrivateStore; store = PrivateStore.create();"
        "store.set('key', 'value'); print(store.name, flush=True); sys.stdin.read()"
    )
    maker = warm_python.talk(program)
    try:
        assert maker.stdout is not None
        with PrivateStore.open(maker.stdout.readline().strip()) as store:
            maker.kill()
            assert store.get("key") == b"value"
            assert store.add("count", 1) == 1
    finally:
        maker.kill()
        maker.communicate()


def test_writers_that_are_killed_leave_the_store_whole(store: PrivateStore) -> None:
    """At any moment: records are complete, counters only grow, and no process waits for the lock of a dead one."""
    delays, name = random.Random(5), store.name
    for turn in range(30):
        pid = os.fork()
        if pid == 0:
            try:
                mine = PrivateStore.open(name)
                for number in range(1 << 30):
                    mine.multi_set([f"turn {turn}", f"{number % 7}"], ["x" * (number % 5000), f"{number}" * 9])
                    mine.add("count", 1)
            finally:
                os._exit(1)
        time.sleep(delays.uniform(0.0, 0.02))
        before = store.add("count", 0)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert store.add("count", 1) > before
        if store.check([f"turn {turn}"]):
            assert set(store.get(f"turn {turn}")) <= {ord("x")}
        with PrivateStore.open(store.name) as fresh:
            assert {key: fresh.get(key) for key in fresh.list_keys()} == {
                key: store.get(key) for key in store.list_keys()
            }


def in_child(job: Callable[[], object], limit: int = 60) -> int:
    """The status with which a forked child ends that does `job`; SIGALRM ends one that hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(limit)
            job()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def test_a_forked_child_has_to_open_it_again(store: PrivateStore) -> None:
    """Also if another thread was inside when it was forked."""
    name = store.name

    def use() -> None:
        with pytest.raises(DistStoreError, match="belongs to the process that this one was forked from. Open it again"):
            store.check(["key"])
        store.close()
        with PrivateStore.open(name) as mine:
            mine.add("count", 1)

    with store._reading():
        assert in_child(use, limit=30) == 0
    assert store.add("count", 1) == 2


def test_a_child_that_lives_on_does_not_keep_the_lock_of_its_killed_parent(
    store: PrivateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers of a data loader live on for a while."""
    monkeypatch.setattr(private_store, "_LOCK_PATIENCE", 1.0)
    forked, over, name = os.pipe(), os.pipe(), store.name

    def killed() -> None:
        with PrivateStore.open(name) as mine, mine._locked():
            if os.fork() == 0:
                os.write(forked[1], b"x")
                os.close(over[1])
                os.read(over[0], 1)
                os._exit(0)
            os.read(forked[0], 1)
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == signal.SIGKILL
    store.set("key", "value")
    for end in (*forked, *over):
        os.close(end)


def test_a_process_without_descriptors(store: PrivateStore) -> None:
    def exhaust() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        with pytest.raises(GroupError, match="Too many open files. Raise the limit on open files"):
            PrivateStore.open(name)
        with pytest.raises(GroupError, match="Too many open files. Raise the limit on open files"):
            PrivateStore.create()

    name = store.name
    assert in_child(exhaust) == 0


def test_a_limit_on_file_sizes_is_an_error_of_the_store(store: PrivateStore) -> None:
    name = store.name

    def fill() -> None:
        mine = PrivateStore.open(name)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(DistStoreError, match=r"File too large.*ulimit -f"):
            mine.set("key", "x" * 30_000)

    assert in_child(fill) == 0
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_many_writers_lose_nothing(store: PrivateStore) -> None:
    """Threads and processes."""
    children, name = [], store.name
    for _ in range(3):
        if (pid := os.fork()) == 0:
            try:
                mine = PrivateStore.open(name)
                for _ in range(200):
                    mine.add("count", 1)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    run_threads(threading.Thread(target=lambda: [store.add("count", 1) for _ in range(200)]) for _ in range(3))
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    assert store.add("count", 0) == 1200

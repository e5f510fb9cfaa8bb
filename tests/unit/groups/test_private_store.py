"""The private store: torch's interface, who may open it, and what happens when a process is killed or stopped."""

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore, TCPStore

from gradwire.errors import CollectiveTimeout, GroupError, PrivateFileGone
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.store import private_store
from gradwire.groups.store.private_store import PrivateStore, mark_used, move, move_if_together, release
from gradwire.groups.store.rendezvous import Rendezvous, host_store
from gradwire.runtime.private_file import create, name_of, open_private
from gradwire.testing.leftovers import open_descriptors


@pytest.fixture
def store() -> Iterator[PrivateStore]:
    with PrivateStore.create() as made:
        yield made


@pytest.fixture
def other(store: PrivateStore) -> Iterator[PrivateStore]:
    """As another process has it."""
    with PrivateStore.open(store.name) as opened:
        yield opened


@pytest.mark.parametrize("wrap", [lambda store: store, lambda store: PrefixStore("p", PrefixStore("q", store))])
def test_it_does_what_torchs_stores_do(
    wrap: Callable[[PrivateStore], PrivateStore], store: PrivateStore, other: PrivateStore
) -> None:
    """Directly, and called by C++."""
    here, there = wrap(store), wrap(other)
    here.set("key", "value")
    assert there.get("key") == b"value"
    there.set("bytes", bytes(range(256)))
    assert here.get("bytes") == bytes(range(256))
    here.set("", "")
    assert there.get("") == b""
    assert [here.add("count", 2), there.add("count", -5), here.add("count", 0)] == [2, -3, -3]
    assert there.add("another", 0) == 0
    assert there.get("another") == b"0"
    assert here.check(["key", "count"])
    assert not here.check(["key", "nothing"])
    here.multi_set(["a", "b"], ["1", "2"])
    assert there.multi_get(["b", "a"]) == [b"2", b"1"]
    there.append("a", "x")
    assert here.get("a") == b"1x"
    assert here.compare_set("a", "1x", "new") == b"new"
    assert there.compare_set("a", "old", "newer") == b"new"
    assert there.compare_set("fresh", "", "made") == b"made"
    assert there.compare_set("missing", "expected", "made") == b"expected"
    assert not here.check(["missing"])
    before = here.num_keys()
    assert there.delete_key("fresh")
    assert not there.delete_key("fresh")
    assert here.num_keys() == before - 1
    assert here.has_extended_api()
    assert innermost(here.clone()) is store


def test_waiting_ends_with_the_key_or_the_time(store: PrivateStore, other: PrivateStore) -> None:
    with pytest.raises(DistStoreError, match=r"wait timeout after 20ms, keys: p/nothing"):
        PrefixStore("p", store).wait(["nothing"], timedelta(milliseconds=20))
    store.set_timeout(timedelta(milliseconds=30))
    with pytest.raises(DistStoreError, match="wait timeout after 30ms"):
        store.get("nothing")
    store.set_timeout(timedelta(seconds=60))
    timer = threading.Timer(0.05, other.set, ("late", "value"))
    timer.start()
    assert store.get("late") == b"value"
    timer.join()


@pytest.mark.parametrize("call", [lambda store: store.get("key"), lambda store: store.add("key", 0)])
def test_a_key_that_was_there_is_read_even_if_it_is_deleted_now(
    call: Callable[[PrivateStore], bytes | int],
    store: PrivateStore,
    other: PrivateStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found and read at once: between two looks another process may delete it."""
    store.set("key", "1")
    reading = store._reading
    looks: list[None] = []

    def look() -> AbstractContextManager[dict[str, bytes]]:
        if looks:
            other.delete_key("key")
        looks.append(None)
        return reading()

    monkeypatch.setattr(store, "_reading", look)
    assert call(store) in (b"1", 1)


@pytest.mark.parametrize("value", [5, None, 1.5])
def test_only_bytes_and_text_are_values(value: object, store: PrivateStore) -> None:
    with pytest.raises(TypeError, match="a bytes-like object is required"):
        store.set("key", value)  # type: ignore[arg-type]
    assert not store.check(["key"])


def test_the_file_is_this_users_alone(store: PrivateStore) -> None:
    status = os.stat(f"/proc/self/fd/{store.name.split(':')[1]}")
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.geteuid())


@pytest.mark.parametrize("name", ["", "1:2", "../../etc/passwd", "1:2:3:4\n", "-1:2:3:4", "1:2:3:4:5", "\u0661:2:3:4"])
def test_a_name_is_four_numbers(name: str) -> None:
    with pytest.raises(GroupError, match="not a valid name"):
        open_private(name)


def test_other_files_of_this_user_are_refused(tmp_path: os.PathLike[str]) -> None:
    """Where another user could choose the file to open and write to."""
    with open(os.path.join(tmp_path, "diary"), "w+") as file:
        with pytest.raises(PrivateFileGone, match="another file has taken its place"):
            open_private(name_of(file.fileno()))
    fd = os.memfd_create("not-gradwires")
    with pytest.raises(PrivateFileGone, match="another file has taken its place"):
        open_private(name_of(fd))
    os.close(fd)


def test_another_inode_is_refused(store: PrivateStore) -> None:
    *rest, inode = store.name.split(":")
    with pytest.raises(PrivateFileGone, match="another file has taken its place"):
        open_private(":".join((*rest, str(int(inode) + 1))))


def test_a_private_file_of_another_use_is_refused() -> None:
    fd = create("gradwire-nccl-store")
    with pytest.raises(PrivateFileGone, match="another file has taken its place"):
        PrivateStore.open(name_of(fd))
    os.close(fd)


def test_a_long_text_is_not_repeated_in_full() -> None:
    """Another user may have written it."""
    with pytest.raises(GroupError, match="not a valid name") as caught:
        open_private("x" * 100_000)
    assert len(str(caught.value)) < 300


def test_a_file_that_others_can_open_is_refused() -> None:
    fd = create()
    os.fchmod(fd, 0o644)
    with pytest.raises(GroupError, match="other users can open it .mode 644"):
        open_private(name_of(fd))
    os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_of_another_user_is_refused() -> None:
    fd = create()
    os.fchown(fd, 65534, -1)
    with pytest.raises(GroupError, match=r"belongs to user 65534, this process runs as 0. It is not used"):
        open_private(name_of(fd))
    os.close(fd)


def test_a_process_that_is_gone_is_an_error() -> None:
    store = PrivateStore.create()
    name = store.name
    store.close()
    with pytest.raises(PrivateFileGone, match="there is no such process here, or it has closed the store"):
        PrivateStore.open(name)


def test_a_closed_store_raises(store: PrivateStore) -> None:
    through = PrefixStore("p", store)
    store.close()
    for call in (lambda: store.set("a", ""), lambda: through.check(["a"]), lambda: through.add("a", 1)):
        with pytest.raises(DistStoreError, match="is closed"):
            call()


def test_it_stays_when_only_cpp_has_it() -> None:
    through = PrefixStore("p", PrivateStore.create())
    through.set("a", "b")
    assert through.get("a") == b"b"
    innermost(through).close()


def test_a_descriptor_that_somebody_else_closed_is_an_error(
    store: PrivateStore, other: PrivateStore, tmp_path: os.PathLike[str]
) -> None:
    """As a program does that closes all descriptors; then another file has the number."""
    fd = int(store.name.split(":")[1])
    os.close(fd)
    other.set("key", "value")
    for _ in range(2):
        for call in (lambda: store.check(["key"]), lambda: store.set("a", "")):
            with pytest.raises(DistStoreError, match="was closed by other code"):
                call()
        if fd not in open_descriptors():
            another = os.open(os.path.join(tmp_path, "another"), os.O_CREAT | os.O_RDWR)
            if another != fd:
                os.dup2(another, fd)
                os.close(another)
    store.close()
    os.close(fd)  # still there


def test_close_does_not_wait_for_its_own_thread(store: PrivateStore) -> None:
    """A garbage collection may close it anywhere."""
    fd = int(store.name.split(":")[1])
    with store._locked():
        store.close()
        assert fd in open_descriptors()
    assert fd not in open_descriptors()
    with pytest.raises(DistStoreError, match="is closed"):
        store.set("a", "")


def test_a_writer_that_is_stopped_holds_nobody_for_long(
    store: PrivateStore, other: PrivateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_store, "_LOCK_PATIENCE", 0.2)
    store.set("key", "value")
    with store._locked():
        assert other.get("key") == b"value"  # readers need no lock
        with pytest.raises(DistStoreError, match="another process has had it locked for 0 s; it is probably stopped"):
            other.set("key", "new")
    other.set("key", "new")
    assert store.get("key") == b"new"


def test_a_stopped_writer_holds_no_reader_of_a_process_that_waits_to_write(
    store: PrivateStore, other: PrivateStore
) -> None:
    store.set("key", "value")
    with other._locked():
        waiting = threading.Thread(target=store.set, args=("key", "new"))
        waiting.start()
        for _ in range(20):
            assert store.get("key") == b"value"
            time.sleep(0.001)
        assert waiting.is_alive()
    waiting.join()
    assert store.get("key") == b"new"


class Stopped:
    """A store whose host is stopped after `answers` calls: later ones do not come back."""

    def __init__(self, answers: int) -> None:
        self.answers = answers
        self.over = threading.Event()

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> None:
            self.answers -= 1
            if self.answers < 0:
                self.over.wait()

        return call


@pytest.mark.parametrize(
    ("answers", "meet"),
    [
        (1, lambda store: Rendezvous(store, 0, 4, timeout=0.5, who="me").exchange("hosts", "here")),
        (0, lambda store: move(store, Rendezvous(store, 1, 2, timeout=0.5, who="me"), key="private", purpose="test")),
    ],
)
def test_a_store_that_does_not_answer_is_asked_once(answers: int, meet: Callable[[Any], object]) -> None:
    """It could not tell who is missing either."""
    store = Stopped(answers)
    try:
        with pytest.raises(CollectiveTimeout, match=r"me: the rendezvous store has not answered check\("):
            meet(store)
        assert store.answers == -1
    finally:
        store.over.set()


def test_a_rank_that_arrives_at_the_last_moment_has_arrived() -> None:
    class Late(HashStore):
        def check(self, keys: list[str]) -> bool:
            present = super().check(keys)
            if len(keys) == 2 and time.monotonic() > deadline:
                self.set("/hosts/1", "there")
            return present

    meeting = Rendezvous(Late(), 0, 2, timeout=0.2, who="me")
    deadline = time.monotonic() + 0.2
    assert meeting.exchange("hosts", "here") == [b"here", b"there"]


def test_a_rank_that_meets_again_does_not_take_the_store_of_its_last_group() -> None:
    """As after destroy_process_group under torchrun, whose store outlives groups, while rank 0 is still in the old one."""
    hosted = host_store()
    clients = [hosted, TCPStore("127.0.0.1", hosted.port, is_master=False)]

    def meet(rank: int) -> Any:
        return move_if_together(clients[rank], rank, 2, purpose="test", timeout=60, who=f"rank {rank}")

    with ThreadPoolExecutor(2) as threads:
        first = list(threads.map(meet, range(2)))
        for rank, store in enumerate(first):
            mark_used(store, rank)
        release(first[1])
        again = threads.submit(meet, 1)
        time.sleep(0.05)  # it may look at the old one meanwhile
        second = [meet(0), again.result()]
        second[0].set("key", "value")
        assert second[1].get("key") == b"value"
        assert not first[0].check(["key"])
    for store in (*first, *second):
        release(store)

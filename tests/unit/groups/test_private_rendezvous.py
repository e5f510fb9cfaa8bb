"""How ranks exchange values in a store, and move from an open store to a private one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from gradwire.errors import CollectiveTimeout
from gradwire.groups.store.private_store import mark_used, move, move_if_together, release
from gradwire.groups.store.rendezvous import Rendezvous, host_store


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

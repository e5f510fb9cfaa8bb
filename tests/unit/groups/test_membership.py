"""Membership: how much it asks of the store, and what it knows of groups over one process group."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.groups import membership
from gradwire.groups.host import is_dead, process_start
from gradwire.groups.membership import Membership


class Counting:
    """A HashStore that counts calls, as a connection that many ranks share."""

    def __init__(self, calls: Counter[str], inner: Any) -> None:
        self._calls, self._inner = calls, inner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            self._calls[name] += 1
            return method(*args)

        return call


def _world(size: int, calls: Counter[str]) -> list[Membership]:
    store = dist.HashStore()
    ranks = [Membership(store, rank, size) for rank in range(size)]
    for rank in ranks:
        rank._connection = Counting(calls, store)
    return ranks


@pytest.mark.parametrize("size", [8, 64])
def test_traffic_while_everybody_waits(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation in flight on all ranks for 10 seconds; there were 2 size calls per rank ten times a second."""
    calls: Counter[str] = Counter()
    ranks, now = _world(size, calls), [1000.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    for rank in ranks:
        rank.joined = 1
    for tick in range(100):
        now[0] = 1000.0 + tick / 10
        for rank in ranks:
            rank.tick(slow=True)
    assert all(member.joined == 1 for rank in ranks for r, member in rank.members.items() if r != rank.rank)
    assert sum(calls.values()) <= 20 * size, calls


def test_operations_that_finish_at_once_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    (rank, other), now = _world(2, calls), [1000.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    for tick in range(100):
        now[0] = 1000.0 + tick / 10
        rank.joined += 1
        rank.tick(slow=False)
    assert not calls
    for tick in range(100, 120):  # a pause
        now[0] = 1000.0 + tick / 10
        rank.tick(slow=False)
    assert calls == {"set": 1, "add": 1}
    other.refresh()
    assert other.members[0].joined == 100


def test_a_process_that_cannot_be_looked_at_is_not_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start = process_start(child.pid)
    assert start
    assert not is_dead(child.pid, start)
    assert is_dead(child.pid, start + "1")
    with monkeypatch.context() as patched:

        def full(*args: Any, **kwargs: Any) -> Any:
            raise OSError(24, "Too many open files")

        patched.setattr("builtins.open", full)
        assert not is_dead(child.pid, start)
    child.communicate()
    assert is_dead(child.pid, start)


EXTRA_GROUP = """
    import os, sys, time, torch, torch.distributed as dist
    import gradwire as gw
    from gradwire.errors import CollectiveTimeout
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
    group = gw.from_process_group(timeout=3)
    if rank == 0:
        looked_at = gw.from_process_group()
        looked_at.barrier()
    else:
        group.barrier()
    if rank == 2:
        time.sleep(20)
        os._exit(0)
    try:
        group.all_reduce(torch.ones(3))
    except CollectiveTimeout as error:
        print(error.joined, error.missing)
        os._exit(0)
"""


def test_a_group_that_one_rank_made_more_confuses_nobody(tmp_path: Any) -> None:
    command = [sys.executable, "-c", textwrap.dedent(EXTRA_GROUP)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert outputs[:2] == ["(0, 1) (2,)\n"] * 2

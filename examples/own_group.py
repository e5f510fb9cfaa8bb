"""Your own group: ranks as threads that meet at a table. docs/own-group.md walks through it.

python examples/own_group.py        # four ranks add up their numbers, then the group passes the conformance suite
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.matching import mismatch
from gradwire.collectives.reference import perform, store
from gradwire.groups import Group, GroupKind, Ranks, Work, register_kind
from gradwire.testing import check_group, run_ranks


class TableGroup(Group):
    """One rank's group. The last rank to join an operation carries it out for all."""

    def __init__(self, rank: int, size: int, table: Table, *, name: str = "table", timeout: float = 20.0) -> None:
        super().__init__(rank, size, name=name, timeout=timeout)
        self.table = table
        self.turns = itertools.count()

    def submit(self, op: Collective) -> Work:
        """Put the operation on the table; if all ranks it needs have joined, carry it out."""
        work = self.begin(op)
        if op.kind.is_p2p:
            deliver(self.table.pair(self.name, work))
        else:
            carry_out(self.table.join((self.name, next(self.turns)), work))
        return work

    def subgroup(self, ranks: list[int], *, name: str) -> Group:
        """The same table, under another name."""
        return TableGroup(ranks.index(self.rank), len(ranks), self.table, name=name, timeout=self.timeout)


class Table:
    """What the ranks share: operations that wait for ranks, and messages that wait for their other half."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.places: dict[tuple[str, int], dict[int, Work]] = defaultdict(dict)
        self.halves: list[tuple[str, Work]] = []

    def join(self, place: tuple[str, int], work: Work) -> list[Work]:
        """Take part in the operation at `place`. Returns all ranks' works, in rank order, for the last to join; else nothing."""
        with self.lock:
            works = self.places[place]
            works[work.ledger.rank] = work
            return [works[rank] for rank in sorted(self.places.pop(place))] if len(works) == work.ledger.size else []

    def pair(self, name: str, work: Work) -> list[Work]:
        """The send and the receive that belong together, for the later of the two; else nothing."""
        with self.lock:
            for half in self.halves:
                if half[0] == name and not half[1].is_completed() and fits(half[1], work):
                    self.halves.remove(half)
                    return [half[1], work] if work.op.kind is OpKind.RECV else [work, half[1]]
            self.halves.append((name, work))
            return []


def fits(a: Work, b: Work) -> bool:
    """Whether one is the send and the other the receive of one message. A receive whose peer is None accepts any rank."""
    peers_match = a.op.peer in (None, b.ledger.rank) and b.op.peer in (None, a.ledger.rank)
    return a.op.kind is not b.op.kind and a.op.tag == b.op.tag and peers_match


def deliver(pair: list[Work]) -> None:
    """Copy the message across."""
    if pair:
        send, recv = pair
        store(recv.op.outputs[0], send.op.inputs[0])
        recv.finish(source_rank=send.ledger.rank)
        send.finish()


def carry_out(works: list[Work]) -> None:
    """Carry out what all ranks have submitted, unless they submitted different operations."""
    if works:
        error = mismatch(works[0].ledger.name, [work.op.signature for work in works])
        if error is None:
            perform([work.op for work in works])
        for work in works:
            work.finish() if error is None else work.fail(error)


def run(fn: Callable[[Group], Any], size: int) -> list[Any]:
    """Run `fn(group)` on `size` ranks, one thread each, and return the results in rank order."""
    table = Table()
    groups = [TableGroup(rank, size, table) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(fn, groups))
    for group in groups:
        group.close()
    return results


TABLES: weakref.WeakKeyDictionary[Any, Table] = weakref.WeakKeyDictionary()


def build(store: Any, rank: int, size: int, *, timeout: float, name: str) -> Group:
    """One rank's group at the table of the ranks that meet in `store`."""
    return TableGroup(rank, size, TABLES.setdefault(store, Table()), name=name, timeout=timeout)


def add_up(group: Group) -> float:
    """The sum of all ranks' numbers, as every rank gets it."""
    t = torch.tensor([group.rank + 1.0])
    group.all_reduce(t, label="numbers")
    return t.item()


if __name__ == "__main__":
    print("four ranks add up 1, 2, 3 and 4:", run(add_up, 4))
    print(check_group(lambda fn: run(fn, 3)))
    register_kind(GroupKind("table", build, Ranks.THREADS))
    print("and by the name of the kind:", run_ranks(add_up, 4, kind="table"))

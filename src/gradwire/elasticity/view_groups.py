"""`ViewGroups`: makes the group of each view. Its first member makes a store for it, and the hub tells the others where: a private
one, or, for members on several hosts, a `HubStore`, which none of them hosts, who could be cut off.
"""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from gradwire.collectives import ReduceOp
from gradwire.elasticity.hub import HubClient
from gradwire.elasticity.machine import View
from gradwire.elasticity.run_records import RunRecords, launcher_of
from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups.base import Group
from gradwire.groups.kinds import AUTO, Ranks, find_kind
from gradwire.groups.shared_memory.fold import CompiledFold
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import check_meetings
from gradwire.groups.threads_group import ThreadGroup

_LOOK, _MEETING = 0.1, 60.0
"""Seconds between two looks at whether the members change again, and in which they meet."""


class ViewGroups:
    """The groups of one process's views, all of one kind."""

    def __init__(self, kind: str = AUTO, *, timeout: float, **options: Any) -> None:
        names = ("shared_memory", "hierarchical") if kind in (AUTO, "shared_memory") else (kind, kind)
        self._kinds = [find_kind(name, who=f"gw.elastic(kind={kind!r})", also=[AUTO]) for name in names]
        """Those for members of one launcher, who meet in a private store, and of several, who meet in the hub."""
        if self._kinds[0].ranks is not Ranks.PROCESSES:
            why = "when one rank dies, mpirun ends all" if self._kinds[0].ranks is Ranks.MPI else "threads die together"
            raise UsageError(f"gw.elastic(kind={kind!r}): {why}. Choose shared_memory, hierarchical, gloo or nccl.")
        if self._kinds[0].needs_gpu:  # nobody but the member may abort what runs: see [Gate] in device_vote.py
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        self._timeout = timeout
        self._options = options if self._kinds[0].shares_memory else {}
        self._stores: deque[PrivateStore | HubStore] = deque(maxlen=64)
        """The last one is that of the view. The others are closed, but threads in C++ may be about to call them."""

    def __call__(self, view: View, me: str, records: RunRecords) -> Group:
        rank, size, name = view.members.index(me), len(view.members), f"view {view.epoch}"
        self.close()
        if size == 1 and not self._kinds[0].needs_gpu:
            return ThreadGroup.world(1, timeout=self._timeout, name=name)[0]
        hub = records.hub if len(set(map(launcher_of, view.members))) > 1 else None
        where = None if rank == 0 else self._find(view, records)
        if isinstance(hub, HubClient):
            self._stores.append(HubStore(hub, where))
        else:
            self._stores.append(PrivateStore.create() if where is None else PrivateStore.open(where))
        if where is None:
            records.announce(view.epoch, self._stores[-1].name)
        build = self._kinds[isinstance(hub, HubClient)].build
        group = build(self._stores[-1], rank, size, timeout=_MEETING, name=name, **self._options)
        group.set_timeout(self._timeout)
        return group

    def warm(self, size: int, dtypes: Collection[torch.dtype]) -> None:
        """Load now what groups of about `size` ranks will need, before others wait for this process."""
        if self._kinds[0].shares_memory:
            for ranks, dtype, op in itertools.product(range(size - 1, size + 2), dtypes, (ReduceOp.SUM, ReduceOp.AVG)):
                CompiledFold.find(op, dtype, ranks)

    def _find(self, view: View, records: RunRecords) -> str:
        deadline = time.monotonic() + _MEETING
        while time.monotonic() < deadline:
            check_meetings()
            where = records.meeting(view.epoch, _LOOK)
            if where is not None:
                return where
        raise CollectiveTimeout(
            f"group of view {view.epoch}: its first member {view.members[0]} has not made a store in {_MEETING:.3g} "
            "s. Look at its output.",
            missing=[0],
        )

    def close(self) -> None:
        """Close the store of the last view, whose group is not used any more."""
        if self._stores:
            self._stores[-1].close()


class HubStore(Store):
    """The store of this name, by default a new one, in the hub of `client`. It has what groups use: they poll with `check`."""

    def __init__(self, client: HubClient, name: str | None = None) -> None:
        super().__init__()
        self.name = name or secrets.token_hex(8)
        self.host, self.port = client.address
        self._client = HubClient(client.address, key=client.key, timeout=10.0)  # a hub that was away has no stores
        self._lock = threading.Lock()
        self._closed = False
        if name is None:
            self._call("make", [])

    def _call(self, verb: str, keys: Sequence[str], *values: str | bytes) -> Any:
        texts = [(v.encode() if isinstance(v, str) else bytes(memoryview(v))).decode("latin-1") for v in values]
        with self._lock:
            answer = None if self._closed else self._client.call("store", self.name, verb, list(keys), *texts)
        if answer is None or None in (answer if verb == "read" else ()):
            raise GroupError(f"{verb} {keys} in store {self.name} of {self._client}: no such store or key any more.")
        return answer

    def close(self) -> None:
        """Any other call raises from now on."""
        with self._lock:
            self._closed = True
            self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", [key], value)

    def get(self, key: str) -> bytes:
        return str(self._call("read", [key])[0]).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", [key], str(amount), secrets.token_hex(8)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return str(self._call("set", [key], desired, expected)).encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._call("check", keys)

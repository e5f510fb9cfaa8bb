"""Makes gloo and NCCL engines: picks the address on which this host listens, and explains failed connections.

Note [Gloo's address]
By default gloo listens on the address that this host's name resolves to: on Debian 127.0.1.1, elsewhere perhaps none. Ranks that
meet over TCP use the local address of their connection to the store, or, where that is a loopback address, the one at which others
have found the store. Ranks that meet in a private store use the loopback address. `GLOO_SOCKET_IFNAME`, which gloo reads itself,
takes precedence.

Note [Connecting on a thread]
Gloo's constructor waits for all ranks, inside the store and then in its connections: up to five times its timeout, and without
noticing that one of them has died. So it runs on a thread, and this rank watches the others meanwhile. If the meeting fails, the
thread is abandoned: its store raises from then on, and a connection attempt is left to its timeout.

Note [A store that needs no interpreter]
NCCL's threads call its store for as long as it lives. A private store is written in Python: a call waits for the interpreter lock,
which a thread that destroys the engine, and joins its threads, may hold. So the engine gets a C++ store of torch's, over a private
file whose name is in the private store.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store

from gradwire.errors import GroupError
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import LOOPBACK, MemberProcess, Rendezvous
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.private_file import create, name_of, open_private
from gradwire.runtime.threads import BoundedCall

ENGINE_MARGIN = 1.0
"""Seconds by which the engine's deadline is later than ours. Ours comes first, because it can name the missing ranks."""


def make_gloo(store: Any, rank: int, size: int, timeout: float) -> tuple[Any, Mapping[int, MemberProcess]]:
    """A gloo engine of all ranks that have met in `store`, and their processes."""
    what = f"gloo group on rank {rank} of {size}"
    rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=what)
    with rendezvous.meeting("gloo"):
        processes = rendezvous.all_processes()
        known = [tuple(json.loads(ways)) for ways in rendezvous.exchange("addresses", json.dumps(_ways(store)))]
        return _connect(rendezvous, PrefixStore("gloo", store), known), processes


def _connect(rendezvous: Rendezvous, store: Any, known: list[Ways]) -> Any:
    """See Note [Connecting on a thread]."""
    rank, size = rendezvous.rank, rendezvous.size
    cancelable = _CancelableStore(store)
    address = _choose(rank, known)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=rendezvous.timeout + ENGINE_MARGIN)
    options._threads = 2

    def failed(problem: str) -> GroupError:
        listen = {r: _choose(r, known) or "what its host's name resolves to" for r in range(size)}
        return GroupError(
            f"{rendezvous.who}: all ranks have arrived, but gloo could not connect them: {problem} "
            f"Addresses, by rank: {listen}. Check that each can be reached from the other hosts, or choose the network "
            "interface: GLOO_SOCKET_IFNAME=eth0 on every rank."
        )

    try:
        if address:
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        elif interface := os.environ.get("GLOO_SOCKET_IFNAME"):
            options._devices = [ProcessGroupGloo.create_device(interface=interface)]
        else:
            options._devices = [ProcessGroupGloo.create_default_device()]
        call = BoundedCall(lambda: ProcessGroupGloo(cancelable, rank, size, options), name="gradwire-gloo-connect")
        with on_failure(call.abandon):
            rendezvous.wait_until(
                lambda seconds: call.wait(seconds) and call.result() is not None,
                lambda: failed(f"not finished after {rendezvous.timeout:.3g} s."),
            )
            return call.result()
    except GroupError:
        raise
    except RuntimeError as error:
        raise failed(str(error).splitlines()[0]) from error
    finally:
        cancelable.canceled.set()


class _CancelableStore(Store):
    """A store that raises once it is canceled, in every thread that waits in it: what gloo's constructor gets."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self.canceled = threading.Event()

    def set(self, key: str, value: str | bytes) -> None:
        self._check()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys are set. Without a timeout: the rank that cancels the store has one."""
        pause = 0.001
        while not self._store.check(keys):
            self._check()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _check(self) -> None:
        if self.canceled.is_set():
            raise RuntimeError("the group is no longer being made")


Ways = tuple[str, str]
"""The local address of a rank's connection to the store, and the store's address as the rank sees it; empty where unknown."""


def _ways(store: Any) -> Ways:
    tcp = innermost(store)
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return "", ""
    if isinstance(tcp, PrivateStore):  # all ranks are on this host
        return LOOPBACK, LOOPBACK
    with suppress(AttributeError, OSError):  # only a store that is reached over TCP has an address
        family, kind, protocol, _, there = socket.getaddrinfo(tcp.host, tcp.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0]), str(there[0])
    return "", ""


def _choose(rank: int, known: list[Ways]) -> str:
    """Where `rank` listens, by Note [Gloo's address]; empty for gloo's own choice."""
    address, _ = known[rank]
    if not address or not _is_loopback(address):
        return address
    return next((store for own, store in known if own and not _is_loopback(own)), address)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


_NAME = "gradwire/nccl"
_LABEL = "gradwire-nccl-store"


def make_nccl(store: Any, rank: int, size: int, timeout: float) -> tuple[Any, Mapping[int, MemberProcess]]:
    """A process group of all ranks that have met in `store`, NCCL for CUDA tensors and gloo for others; and their processes."""
    kinds, nccl = dist.ProcessGroup.BackendType, dist.ProcessGroupNCCL
    cpu, processes = make_gloo(store, rank, size, timeout)
    store, fd = _without_interpreter(store, rank, timeout)
    with nullcontext() if fd is None else on_failure(os.close, fd):
        pg = dist.ProcessGroup(PrefixStore("c10d", store), rank, size)
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout + ENGINE_MARGIN)
        pg._set_default_backend(kinds.NCCL)
        pg._register_backend(torch.device("cuda"), kinds.NCCL, nccl(PrefixStore("nccl", store), rank, size, options))
        pg._register_backend(torch.device("cpu"), kinds.GLOO, cpu)
    if fd is not None:
        weakref.finalize(pg, os.close, fd).atexit = False  # the engine may still exist at exit
    return pg, processes


def _without_interpreter(store: Any, rank: int, timeout: float) -> tuple[Any, int | None]:
    """A pure C++ store for the same ranks, and the descriptor it needs. See Note [A store that needs no interpreter]."""
    if not isinstance(innermost(store), PrivateStore):
        return store, None
    fd = create(_LABEL) if rank == 0 else open_private(store.get(_NAME).decode(), _LABEL)
    with on_failure(os.close, fd):
        if rank == 0:
            os.ftruncate(fd, 0)
            store.set(_NAME, name_of(fd))
        native = FileStore(f"/proc/self/fd/{fd}", -1)
        native.set_timeout(timedelta(seconds=timeout))
    return native, fd

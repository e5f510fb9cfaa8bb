"""Makes gloo engines: picks the address on which this host listens, and explains failed connections.

Note [Gloo's address]
By default gloo listens on the address that this host's name resolves to: on Debian 127.0.1.1, elsewhere perhaps nothing at all, and
ranks on other hosts try to connect to themselves. Ranks that meet over TCP have a better one: the local address of the connection
to the store, which the others can reach. On the store's own host that may be a loopback address as well, since its name resolves
to one there; then it is the address at which ranks on other hosts have found the store. Ranks that meet in a private store are on
one host, and use its loopback address. `GLOO_SOCKET_IFNAME`, which gloo reads itself, takes precedence.

Note [Connecting on a thread]
Gloo's constructor waits for all ranks, inside the store and then in its connections: up to five times its timeout, and without
noticing that one of them has died. So it runs on a thread, and this rank watches the others meanwhile. If the meeting fails, the
thread is abandoned: its store raises from then on, and a connection attempt is left to its timeout.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from gradwire.errors import GroupError
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import LOOPBACK, MemberProcess, Rendezvous
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

    def late() -> GroupError:
        return failed(f"not finished after {rendezvous.timeout:.3g} s.")

    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=address) if address else _default_device()]
        call = BoundedCall(lambda: ProcessGroupGloo(cancelable, rank, size, options), name="gradwire-gloo-connect")
        try:
            rendezvous.wait_until(lambda seconds: call.wait(seconds) and call.result() is not None, late)
            return call.result()
        except BaseException:
            call.abandon()
            raise
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
        """Write one key."""
        self._check()
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set."""
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


def _default_device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_default_device()


Ways = tuple[str, str]
"""The local address of a rank's connection to the store, and the store's address as the rank sees it; empty where unknown."""


def _ways(store: Any) -> Ways:
    tcp = innermost(store)
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return "", ""
    if isinstance(tcp, PrivateStore):  # all ranks are on this host
        return LOOPBACK, LOOPBACK
    if not isinstance(tcp, TCPStore):
        return "", ""
    try:
        family, kind, protocol, _, there = socket.getaddrinfo(tcp.host, tcp.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(there)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0]), str(there[0])
    except OSError:
        return "", ""


def _choose(rank: int, known: list[Ways]) -> str:
    """Where `rank` listens, by Note [Gloo's address]; empty for gloo's own choice."""
    address, _ = known[rank]
    if not address or not _is_loopback(address):
        return address
    return next((store for own, store in known if own and not _is_loopback(own)), address)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback

"""Makes gloo engines: picks the address on which this host listens, and explains failed connections.

Note [Gloo's address]
By default gloo listens on the address that this host's name resolves to: on Debian 127.0.1.1, elsewhere perhaps nothing at all, and
ranks on other hosts try to connect to themselves. Ranks that meet over TCP have a better one: the local address of the connection
to the store, which the others can reach. On the store's own host that may be a loopback address as well, since its name resolves
to one there; then it is the address at which ranks on other hosts have found the store. Ranks that meet in a private store are on
one host, and use its loopback address. `GLOO_SOCKET_IFNAME`, which gloo reads itself, takes precedence.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from gradwire.errors import GroupError
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.groups.store.tcp_store import LOOPBACK

ENGINE_MARGIN = 1.0
"""Seconds by which the engine's deadline is later than ours. Ours comes first, because it can name the missing ranks."""


def make_gloo(store: Any, rank: int, size: int, timeout: float) -> Any:
    """A gloo engine of all ranks that have met in `store`."""
    what = f"gloo group on rank {rank} of {size}"
    mine = _ways(store)
    rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=what)
    known: list[Ways] = [tuple(json.loads(ways)) for ways in rendezvous.exchange("gloo-addresses/", json.dumps(mine))]
    address = _choose(rank, known)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout + ENGINE_MARGIN)
    options._threads = 2
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=address) if address else _default_device()]
        return ProcessGroupGloo(PrefixStore("gloo", store), rank, size, options)
    except RuntimeError as error:
        listen = {r: _choose(r, known) or "what its host's name resolves to" for r in range(size)}
        raise GroupError(
            f"{what}: all ranks have arrived, but gloo could not connect them: {str(error).splitlines()[0]} "
            f"Addresses, by rank: {listen}. Check that each can be reached from the other hosts, or choose the network "
            "interface: GLOO_SOCKET_IFNAME=eth0 on every rank."
        ) from error


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

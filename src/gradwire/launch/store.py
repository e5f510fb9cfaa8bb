"""The rendezvous of a world: the store that the launcher or rank 0 hosts, and waiting until all ranks have arrived.

On one host that is a private store, which no other user can reach. `gradwire run` makes one; under other launchers rank 0 sends the
name of one through a TCPStore, or over MPI. torch's TCPStore is used only once it can be reached: its own attempts to connect fill
the screen with C++ stacks and cannot be interrupted.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from ipaddress import ip_address

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups.failure.store_calls import bounded, innermost
from gradwire.groups.store.private_store import PrivateStore, move, move_if_together, release
from gradwire.groups.store.rendezvous import Rendezvous, host_store
from gradwire.launch.world import Address, World
from gradwire.runtime.cleanup import on_failure

_TOKEN = secrets.token_hex(8)
"""Identifies this process, across hosts."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.25
"""Seconds between two polls of a store or a port; neither can be waited on quietly and with a deadline."""
_MPI_LENGTH = 512
_NOT_REACHED = "Check that rank 0 has started and that its host and port can be reached from here."
_OTHER_ADDRESS = (
    "This rank hosts it, so the address must be one of this host: set MASTER_ADDR on all ranks to the host of rank 0."
)


def open_store(world: World, *, timeout: float, meeting: int = 0) -> Store:
    """Open the store of this rank's world. `meeting` is how often the ranks have met before."""
    if world.size > 1 and world.private:
        return _opened(PrivateStore.open(world.private), timeout)
    if world.size == 1 or (address := world.store) is None:
        return HashStore()
    if address.port == 0:
        return _open_by_mpi(world, address.host, timeout)
    open_at = _host_at if world.rank == 0 and not world.hosted else _connect
    store = open_at(address, world, timeout)
    if world.attempt:
        store = PrefixStore(f"attempt/{world.attempt}", store)
    purpose, who = f"{address}, attempt {world.attempt or 0}, meeting {meeting}", f"gw.init() on {world}"
    if world.local_size is None:
        ours = PrefixStore(f"gradwire/move/{meeting}", store)
        moved = move_if_together(ours, world.rank, world.size, purpose=purpose, timeout=timeout, who=who)
        return store if moved is ours else moved
    if world.on_one_host:
        ranks = Rendezvous(store, world.rank, world.size, timeout=timeout, who=who)
        return move(store, ranks, key=f"gradwire/private/{meeting}", purpose=purpose)
    return store


def _open_by_mpi(world: World, host: str, timeout: float) -> Store:
    """Rank 0 makes a private store, or one at a port of its choice, and sends its name to the others over MPI."""
    mine: PrivateStore | TCPStore | None = None
    text = ""
    if world.rank == 0 and world.on_one_host:
        mine = PrivateStore.create()
        text = mine.name
    elif world.rank == 0:
        mine = host_store("", timeout=timeout)
        text = str(Address(host or socket.gethostname(), mine.port))
    with on_failure(release, mine):
        text = broadcast_text(text, world, timeout=timeout)
    if world.on_one_host:
        return _opened(mine or PrivateStore.open(text), timeout)
    host, _, port = text.rpartition(":")
    return mine or _connect(Address(host, int(port)), world, timeout)


def _opened(store: Store, timeout: float) -> Store:
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _connect(address: Address, world: World, timeout: float) -> Store:
    _reach(address, world, timeout)
    return TCPStore(address.host, address.port, is_master=False, timeout=timedelta(seconds=timeout))


def broadcast_text(text: str, world: World, *, timeout: float) -> str:
    """Rank 0's `text`, on every rank. Needs mpi4py, built for the MPI whose mpirun is used."""
    try:
        from mpi4py import MPI  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise UsageError(
            f"gw.init() on {world}: ranks started by mpirun get the store's address over MPI, but mpi4py cannot be imported: "
            f"{error}. Install gradwire[mpi], or set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there: "
            "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ..."
        ) from error
    comm = MPI.COMM_WORLD
    if (comm.rank, comm.size) != (world.rank, world.size):
        raise UsageError(
            f"gw.init() on {world}: in mpi4py this is rank {comm.rank} of {comm.size}. It was built for another MPI than that of "
            "this mpirun: use that MPI's mpirun, or set MASTER_ADDR and MASTER_PORT."
        )
    message = bytearray(text.encode().ljust(_MPI_LENGTH))
    request = comm.Ibcast(message, root=0)
    for _ in _pauses(timeout):
        if request.Test():  # not Wait: it has no deadline
            return bytes(message).decode().strip()
    raise CollectiveTimeout(
        f"gw.init() on {world}: rank 0 has not sent the store's address over MPI within {timeout:.3g} s. "
        "Check that every rank calls gw.init()."
    )


def _listen(address: Address, world: World) -> socket.socket | None:
    """A listening socket at the port of `address`. If all ranks are on this host, only this host can reach it."""
    try:
        if world.on_one_host:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            if all(ip_address(str(there[0]).partition("%")[0]).is_loopback for *_, there in found):
                family, _, _, _, there = found[0]
                return socket.create_server(there[:2], family=family, backlog=2048)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", address.port), family=family, backlog=2048, dualstack_ipv6=both)
    except OSError:
        # Perhaps a store of this process has the port, which the new one then shares; otherwise the new one fails.
        return None


def _host_at(address: Address, world: World, timeout: float) -> Store:
    listener = _listen(address, world)
    with on_failure(socket.socket.close, listener) if listener is not None else nullcontext():
        _reach(address, world, timeout)  # here too: the name may be wrong, or of another host
    try:
        # multi_tenant: torch.distributed may open a store at this address in the same process.
        return TCPStore(
            address.host,
            address.port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except RuntimeError as error:
        raise GroupError(
            f"gw.init() on {world}: rank 0 cannot host the store at {address}: {str(error).splitlines()[0]} "
            "Another job may use the port, or the address may belong to another host: set MASTER_PORT and MASTER_ADDR."
        ) from error


def _reach(address: Address, world: World, timeout: float) -> None:
    """Return when something listens at `address`."""
    why: OSError | None = None
    for left in _pauses(timeout):
        try:
            return socket.create_connection((address.host, address.port), timeout=max(0.1, left)).close()
        except OSError as error:
            why = error
    advice = _OTHER_ADDRESS if world.rank == 0 and not world.hosted else _NOT_REACHED
    raise CollectiveTimeout(
        f"gw.init() on {world}: the store at {address} could not be reached within {timeout:.3g} s: {why}. {advice}"
    ) from why


def _pauses(timeout: float) -> Iterator[float]:
    """Yields the seconds that are left, the last time at the deadline, and sleeps in between."""
    pause, deadline = _FIRST_PAUSE, time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        yield left
        if left <= 0:
            return
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def arrive(store: Store, world: World, *, timeout: float) -> None:
    """Wait until every rank has arrived. A timeout names the missing ranks; a second process with the same rank is refused."""
    rendezvous = Rendezvous(store, world.rank, world.size, timeout=timeout, who=f"gw.init() on {world}")
    store = rendezvous.store
    me = f"{_TOKEN}-{os.getpid()}"  # a forked child has the same token
    times = store.add(f"came/{world.rank}", 1)
    if times == 1:
        store.set(f"process/{world.rank}", me)
    elif not store.check([f"process/{world.rank}"]) or store.get(f"process/{world.rank}").decode() != me:
        raise UsageError(
            f"gw.init() on {world}: another process is already rank {world.rank}. Child processes of ranks inherit their "
            "environment variables: unset them there, or call gw.init() only in the ranks."
        )
    # After a timeout a process may try again: it has been counted.
    if times == 1 and store.add("came", 1) == world.size:
        store.set("complete", "")
    for _ in _pauses(timeout):
        if store.check(["complete"]):
            return
    came = {rank for rank in range(world.size) if store.check([f"came/{rank}"])}
    raise rendezvous.absent([rank for rank in range(world.size) if rank not in came], sorted(came))


def say_goodbye(store: Store, world: World, *, patience: float) -> None:
    """Report that this rank no longer needs the store; the rank that hosts it waits for all reports, up to `patience` seconds."""
    if world.size == 1 or world.hosted or isinstance(innermost(store), PrivateStore):  # which no process hosts
        return
    store = bounded(store, patience, f"leaving on {world}")
    try:
        left = store.add("left", 1)
        deadline = time.monotonic() + patience
        while world.rank == 0 and left < world.size and time.monotonic() < deadline:
            time.sleep(_FIRST_PAUSE)
            left = store.add("left", 0)
    except (RuntimeError, CollectiveTimeout):
        return  # the host is gone, so it need not be told

"""Makes gloo and NCCL engines, and destroys engines without leaving a thread inside them.

Note [Gloo's address]
By default gloo listens on the address that this host's name resolves to: on Debian 127.0.1.1, elsewhere perhaps none. Ranks that
meet over TCP use the local address of their connection to the store, or, where that is a loopback address, the one at which others
found the store. Ranks that meet in a private store use the loopback address. `GLOO_SOCKET_IFNAME`, read by gloo, overrides them.

Note [Connecting on a thread]
Gloo's constructor waits for all ranks, inside the store and then in its connections: up to five times its timeout, and without
noticing that one of them has died. So it runs on a thread, and this rank watches the others meanwhile. If the meeting fails, the
thread is abandoned: its store raises from then on, and a connection attempt is left to its timeout.

Note [A store that needs no interpreter]
NCCL's threads call its store as long as it lives. A private store is written in Python: a call waits for the interpreter lock,
which a thread that destroys the engine and joins its threads may hold. So NCCL gets a C++ store over a private file named in it.

Note [The engine's threads and the interpreter's end]
A thread in C++ that waits for the interpreter lock when the interpreter shuts down is unwound by force, and the program aborts with
"terminate called without an active exception". It may be inside a call of the engine, or a thread of gloo that drops the last
reference to a tensor. So when a group ends, and at interpreter exit, operations get a moment to finish; then gloo's connections are
aborted, which fails everything in them. An engine that is still busy after that is not destroyed: a reference is leaked.

Note [Aborting gloo]
`ProcessGroupGloo.abort()` leaves operations where they are. But a receive that times out closes all connections of its engine, and
every operation fails with "Application timeout caused pair closure"; a receive with an unused tag always times out.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store

from gradwire.errors import GroupError
from gradwire.groups import forked
from gradwire.groups.c10d.engine import C10dEngine
from gradwire.groups.c10d.python_work import PythonWork
from gradwire.groups.c10d.work import C10dWork, CompletionPoller, MessageThreads
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.ledger import Ledger
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import LOOPBACK, MemberProcess, Rendezvous
from gradwire.runtime.cleanup import on_failure
from gradwire.runtime.private_file import create, name_of, open_private
from gradwire.runtime.threads import BoundedCall, Worker

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


_UNUSED_TAG = 2**31 - 1
_MOMENT = 0.5
"""Seconds that operations in the engine get to finish when the group ends."""
_PAUSE = 0.005
_ABORTED_WITHIN = 5.0
"""Seconds within which operations on aborted connections fail; it takes milliseconds unless the machine is overloaded."""


def abort_gloo(engine: Any) -> None:
    """Close all connections of a gloo engine; what is in flight in it fails at once. See Note [Aborting gloo]."""
    for peer in range(engine.size()):
        if peer == engine.rank():
            continue
        try:
            engine.recv([torch.empty(1, device="cpu")], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            pass  # the intended timeout, which closes all connections; or this one is already closed, and others may not be


def is_idle(natives: Sequence[Any], within: float) -> bool:
    """Whether the engine is done with all of `natives`; waits for that at most `within` seconds."""
    deadline = time.monotonic() + within
    while any(not native.is_completed() for native in natives):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def quiesce(engines: Sequence[Any], natives: Callable[[], Sequence[Any]], patience: float) -> bool:
    """Let `natives` finish, for at most `patience` seconds, then abort their engines. Whether no operation is left in them."""
    if is_idle(natives(), patience):
        return True
    abortable = [engine for engine in engines if isinstance(engine, ProcessGroupGloo)]
    for engine in abortable:
        abort_gloo(engine)
    return bool(abortable) and is_idle(natives(), _ABORTED_WITHIN)


def destroy(owned: list[Any], *, leak: Sequence[Any]) -> None:
    """Drop the last references to the engines in `owned`. If operations in them, `leak`, cannot be stopped, engines and operations
    are leaked: a destructor would wait for them."""
    if leak and owned:
        forked.leak([*leak, *owned])
        owned.clear()
    while owned:
        engine = owned.pop()
        if isinstance(engine, dist.ProcessGroup):
            engine.shutdown()
        del engine


@dataclass(frozen=True, slots=True)
class Teardown:
    """Stops a group's operations and destroys its engines, when it is closed or at exit: see Note [The engine's threads and the
    interpreter's end]. Does not keep the group alive."""

    ledger: Ledger
    lane: Worker
    poller: CompletionPoller
    messages: MessageThreads
    backends: dict[str, tuple[Any, C10dEngine]]
    owned: list[Any]

    def __call__(self, abort: bool) -> None:
        """Stop the threads and drop the engines. `abort` their operations; in a process group that is not ours, only at exit."""
        self.lane.stop(timeout=2.0)
        self.poller.stop(timeout=2.0)
        idle = True
        if abort:
            idle = quiesce([backend for backend, _ in self.backends.values()], self._natives, _MOMENT)
            idle &= self.messages.stop(timeout=5.0)
        self.backends.clear()
        leak = [] if idle else [native for native in self._natives() if not isinstance(native, PythonWork)]
        self.poller.abandoned.clear()  # a Work that a caller keeps references the poller, and must not keep the engine alive
        destroy(self.owned, leak=leak)

    def _natives(self) -> list[Any]:
        pending = [work.native for work in list(self.ledger.pending.values()) if isinstance(work, C10dWork)]
        others = self.poller.take_abandoned() + list(self.messages.running.values())
        return [native for native in pending + others if native is not None]

"""How ranks that have met in an open store, which other users of the host can reach too, move to a private one.

Rank 0 makes it and writes its name into the open store; the others open it. From then on nothing is read from the open store.
Until then another user can write there too: the name of that user's own file is refused (`private_file.py`), and the name of
another job's store leads to a store with another purpose.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from gradwire.errors import GroupError, PrivateFileGone
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import Rendezvous
from gradwire.runtime.private_file import available

_PURPOSE = "gradwire/purpose"
_USED = "gradwire/used/"
_PAUSE = 0.01


def move(store: Any, rendezvous: Rendezvous, *, key: str, purpose: str) -> PrivateStore:
    """The private store of ranks that meet in `store`, all on this host. Rank 0 keeps `store` alive: it may host it."""
    rank, timeout, who = rendezvous.rank, rendezvous.timeout, rendezvous.who
    if rank == 0:
        private = PrivateStore.create(keep=store)
        try:
            private.set(_PURPOSE, purpose)
            rendezvous.store.set(key, private.name)
        except BaseException:
            private.close()
            raise
        return _timed(private, timeout)
    deadline = time.monotonic() + timeout
    while True:
        name = rendezvous.receive(key, source=0, within=deadline - time.monotonic()).decode(errors="replace")
        try:
            private = _open_unused(name, rank)
            break
        except PrivateFileGone:  # left by a failed attempt or an earlier group; rank 0 makes another
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE)
    if not private.check([_PURPOSE]) or private.get(_PURPOSE).decode() != purpose:
        private.close()
        raise GroupError(
            f"{who}: the private store {name} that the open store names does not belong to {purpose}. It is not used: the open "
            "store was tampered with, or two jobs share it."
        )
    return _timed(private, timeout)


def move_if_together(store: Any, rank: int, size: int, *, purpose: str, timeout: float, who: object) -> Any:
    """A private store if `store` is open to other users and all ranks are on one host, else `store`. Waits for all ranks."""
    if size == 1 or not isinstance(innermost(store), TCPStore) or not available():
        return store
    rendezvous = Rendezvous(store, rank, size, timeout=timeout, who=who)
    with rendezvous.meeting("gradwire/together", report=False):
        if len({process.host for process in rendezvous.all_processes().values()}) > 1:
            return store
    return move(store, rendezvous, key="gradwire/private", purpose=purpose)


def mark_used(store: Any, rank: int) -> None:
    """Mark that this rank has a group in `store`: if the ranks meet again in the open store, they move to a new private store."""
    inner = innermost(store)
    if isinstance(inner, PrivateStore):
        inner.set(f"{_USED}{rank}", "")


def _open_unused(name: str, rank: int) -> PrivateStore:
    private = PrivateStore.open(name)
    if private.check([f"{_USED}{rank}"]):
        private.close()
        raise PrivateFileGone(
            f"opening the private store {name}: it belongs to an earlier group, which rank 0 has not left yet."
        )
    return private


def release(store: Any) -> None:
    """Close the store below all prefixes if it is a private one."""
    inner = innermost(store)
    if isinstance(inner, PrivateStore):
        inner.close()


def _timed(private: PrivateStore, timeout: float) -> PrivateStore:
    private.set_timeout(timedelta(seconds=timeout))
    return private

"""`Rendezvous`: ranks that have no group yet meet through a store. Every wait has a deadline; its error names the missing ranks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gradwire.errors import CollectiveTimeout
from gradwire.groups.failure.store_calls import bounded


class Rendezvous:
    """One rank's part in the rendezvous of `size` ranks in `store`. Errors begin with `who`."""

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float, who: object) -> None:
        self.store = bounded(store, timeout, who)
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.who = who

    def next_key(self, base: str) -> str:
        """A key under `base` for one group: ranks make the groups over one store in the same order, so they get the same key."""
        return f"{base}/{self.store.add(f'{base}/{self.rank}/groups', 1)}"

    def exchange(self, prefix: str, value: str) -> list[bytes]:
        """Every rank's value, in rank order. CollectiveTimeout names the missing ranks."""
        keys = [f"{prefix}{r}" for r in range(self.size)]
        self.store.set(keys[self.rank], value)
        self._wait(keys, range(self.size), self.timeout)
        return [self.store.get(key) for key in keys]

    def receive(self, key: str, *, source: int, within: float | None = None) -> bytes:
        """The value that rank `source` sets. CollectiveTimeout names it if it does not arrive in time."""
        self._wait([key], [source], self.timeout if within is None else within)
        value: bytes = self.store.get(key)
        return value

    def _wait(self, keys: list[str], ranks: Sequence[int], timeout: float) -> None:
        try:
            self.store.wait(keys, timedelta(seconds=max(0.001, timeout)))
        except CollectiveTimeout:  # the store does not answer, so it cannot be asked which ranks are missing
            raise
        except RuntimeError as error:
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])]
            if missing:  # else they arrived at the last moment
                raise self.absent(missing, [rank for rank in (*ranks, self.rank) if rank not in missing]) from error

    def absent(self, missing: Sequence[int], joined: Sequence[int]) -> CollectiveTimeout:
        """The error for ranks that did not arrive in time."""
        return CollectiveTimeout(
            f"{self.who}: ranks {list(missing)} did not arrive within {self.timeout:.3g} s. Check that they have started, and "
            "look at their output.",
            joined=sorted(set(joined)),
            missing=missing,
        )

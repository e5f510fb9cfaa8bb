"""`Rendezvous`: how ranks that have no group yet meet through a store. Every wait has a deadline, and names who is missing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gradwire.errors import CollectiveTimeout
from gradwire.groups.bounded_store import bounded


class Rendezvous:
    """One rank's part in a meeting of `size` ranks in `store`. Errors begin with `who`."""

    def __init__(self, store: Any, rank: int, size: int, *, timeout: float, who: object) -> None:
        self.store = bounded(store, timeout, who)
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.who = who

    def next_key(self, base: str) -> str:
        """A key below `base` for one group: ranks make the groups over one store in the same order, so they get the same key."""
        return f"{base}/{self.store.add(f'{base}/{self.rank}/groups', 1)}"

    def exchange(self, prefix: str, value: str) -> list[bytes]:
        """Every rank's value, in rank order. CollectiveTimeout names the ranks that have not come."""
        keys = [f"{prefix}{r}" for r in range(self.size)]
        self.store.set(keys[self.rank], value)
        self._wait(keys, range(self.size), self.timeout)
        return [self.store.get(key) for key in keys]

    def receive(self, key: str, *, source: int, within: float | None = None) -> bytes:
        """The value that rank `source` sets. CollectiveTimeout names it if it has not come in time."""
        self._wait([key], [source], self.timeout if within is None else within)
        value: bytes = self.store.get(key)
        return value

    def _wait(self, keys: list[str], ranks: Sequence[int], timeout: float) -> None:
        try:
            self.store.wait(keys, timedelta(seconds=max(0.001, timeout)))
        except CollectiveTimeout:  # the store does not answer, so it would not say who is missing
            raise
        except RuntimeError as error:
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])]
            if missing:  # and not come in the last moment
                raise self.absent(missing, [rank for rank in (*ranks, self.rank) if rank not in missing]) from error

    def absent(self, missing: Sequence[int], joined: Sequence[int]) -> CollectiveTimeout:
        """The error for ranks that have not come in time."""
        return CollectiveTimeout(
            f"{self.who}: ranks {list(missing)} have not come within {self.timeout:.3g} s. See whether they have started, and "
            "what their output says.",
            joined=sorted(set(joined)),
            missing=missing,
        )

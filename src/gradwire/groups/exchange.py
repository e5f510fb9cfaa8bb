"""Ranks that have no group yet exchange values through a store."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gradwire.errors import CollectiveTimeout
from gradwire.groups.bounded_store import bounded


def exchange(store: Any, prefix: str, rank: int, size: int, value: str, *, timeout: float, who: object) -> list[bytes]:
    """Every rank's value, in rank order. CollectiveTimeout names the ranks that have not come; `who` waits for them."""
    calls = bounded(store, timeout, who)
    keys = [f"{prefix}{r}" for r in range(size)]
    calls.set(keys[rank], value)
    try:
        calls.wait(keys, timedelta(seconds=timeout))
    except CollectiveTimeout:  # the store does not answer, so it would not say who is missing
        raise
    except RuntimeError as error:
        missing = [r for r, key in enumerate(keys) if not calls.check([key])]
        if missing:  # and not come in the last moment
            raise CollectiveTimeout(
                f"{who}: ranks {missing} have not come within {timeout:.3g} s. See whether they have started, and what their "
                "output says.",
                joined=[r for r in range(size) if r not in missing],
                missing=missing,
            ) from error
    return [calls.get(key) for key in keys]

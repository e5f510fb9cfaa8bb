"""Collectives to compare with the reference, and what each rank must hold afterward.

Note [Ranks in one process share results]
A case's values depend only on the check, the position in it, the number of ranks and the device. These identify its results, so
ranks that are threads of one process compute them once. The cache is weak: no rank can be done with a case before all have begun
it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from gradwire.collectives import Collective
from gradwire.collectives.reference import perform

Make = Callable[[int], Collective]
"""Returns a rank's Collective, with the same values each time."""


@dataclass(frozen=True, slots=True)
class Case:
    """One collective to compare with the reference. `plain` makes it in ordinary memory, if `make` uses other memory or strides."""

    what: str
    make: Make
    plain: Make | None = None


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Results:
    """Collectives whose tensors hold what every rank's must hold, in rank order."""

    ranks: tuple[Collective, ...]


_Key = tuple[str, int, int, torch.device]
_positions: ContextVar[Iterator[tuple[str, int]] | None] = ContextVar("positions", default=None)
_shared: weakref.WeakValueDictionary[_Key, Results] = weakref.WeakValueDictionary()
_lock = threading.Lock()


@contextmanager
def numbered(check: str) -> Iterator[None]:
    """Count the cases of a check, which this thread runs in the block. See Note [Ranks in one process share results]."""
    token = _positions.set(zip(itertools.repeat(check), itertools.count()))
    try:
        yield
    finally:
        _positions.reset(token)


def expected(case: Case, size: int) -> Results:
    """What the reference makes of the next case."""
    positions = _positions.get()
    if positions is None:
        return _compute(case, size)
    key = (*next(positions), size, torch.get_default_device())
    with _lock:
        found = _shared.get(key)
        if found is None:
            found = _shared[key] = _compute(case, size)
        return found


def _compute(case: Case, size: int) -> Results:
    make = case.plain or case.make
    ops = tuple(make(rank) for rank in range(size))
    perform(ops)
    return Results(ops)

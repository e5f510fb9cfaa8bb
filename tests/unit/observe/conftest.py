"""Rings that are made up."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire.observe.rings.ring import Record, Ring
from gradwire.recorder.format import RecordKind
from helpers.made_rings import made


@pytest.fixture
def record() -> Callable[..., Record]:
    """A record of the given kind and time; the rest is empty unless given."""
    numbers = itertools.count()

    def make(kind: RecordKind, time: int, **fields: Any) -> Record:
        return made(next(numbers), time, kind, **fields)

    return make


@pytest.fixture
def ring() -> Callable[..., Ring]:
    """A ring of the given rank and records, on the clock of `host`."""

    def make(rank: int, *records: Record, host: str = "a") -> Ring:
        header = {"rank": rank, "size": 2, "pid": 1, "host": host, "clock": host, "started": 0, "started_wall": 0}
        return Ring(Path(f"rank-{rank}.ring"), header, list(records))

    return make

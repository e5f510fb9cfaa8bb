"""Rings that are made up, and a recorder that is stopped at the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire import observe
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


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """The directory in which this process is recorded, as rank 0 of 1."""
    observe.start(tmp_path / "run", rank=0, size=1)
    yield tmp_path / "run"
    observe.stop()

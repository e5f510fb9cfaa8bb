"""Small shared-memory segments. A directory's conftest imports the fixture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire.groups.shared_memory.segment import Segment, Ticket, default_directory

SIZE = 1 << 20


def new(directory: str | Path = "", *, nbytes: int = SIZE, ranks: int = 2) -> tuple[Segment, Ticket]:
    return Segment.create(ranks=ranks, nbytes=nbytes, directory=str(directory or default_directory()), host="here")


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    """A segment and its ticket."""
    made: list[Any] = list(new())
    yield made
    made[0].close()
    made.clear()  # pytest keeps the fixture's value until after the look for leftovers, and a mapping has a descriptor

"""Warnings of ranks, as the flight recorder keeps them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire import observe
from gradwire.testing import run_ranks


def recorded_warnings(folder: Path, rank_main: Callable[..., None], size: int, *, match: str) -> list[Any]:
    """Those of a run that warns once, with this text, and records each."""
    observe.start(folder, rank=0, size=1)
    try:
        with pytest.warns(RuntimeWarning, match=match) as caught:
            run_ranks(rank_main, size)
    finally:
        observe.stop()
    assert len(caught) == 1
    return list(observe.read_warnings(observe.read_rings(folder)))

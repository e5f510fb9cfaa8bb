"""`RankContext`: what a rank process of a benchmark is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from gradwire.cli.experiment.barrier import Barrier


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a world that `world.run_world` has started."""

    rank: int
    size: int
    store: Store
    """Where groups of all kinds meet."""
    barrier: Barrier
    """Where ranks wait for each other between turns."""
    timeout: float
    """Seconds that any wait may take."""
    report: Callable[[Any], None]
    """Send progress to the process that started the world."""

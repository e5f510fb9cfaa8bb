"""`Seat`: what a rank process of a benchmark is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from gradwire.cli.experiment.meeting import Meeting


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place in a world that `world.run_world` has started."""

    rank: int
    size: int
    store: Store
    """Where groups of all kinds meet."""
    meeting: Meeting
    """Where ranks wait for each other between turns."""
    timeout: float
    """Seconds that any wait may take."""
    tell: Callable[[Any], None]
    """Send news to the process that started the world."""

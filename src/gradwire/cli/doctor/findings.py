"""What the doctor found: a value, whether it is good, and what to do if it is not."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """Training works, but perhaps not as well as it could."""
    PROBLEM = "problem"
    """Training fails or hangs, or is far slower than it should be."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact, judged. Everything but OK has a `fix`."""

    area: str
    name: str
    value: str
    level: Level = Level.OK
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "area": self.area,
            "name": self.name,
            "value": self.value,
            "level": self.level.value,
            "fix": self.fix,
        }

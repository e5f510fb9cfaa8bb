"""`WorkInfo`: a record of a finished operation."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.collectives import Signature


@dataclass(frozen=True, slots=True)
class WorkInfo:
    """A finished operation: what completion hooks receive."""

    op: Signature
    group: str
    rank: int
    seq: int
    bytes: int
    started: float
    finished: float
    error: BaseException | None

    @property
    def kind(self) -> str:
        """The operation's name, such as "all_reduce"."""
        return str(self.op.kind.value)

    @property
    def label(self) -> str:
        """The caller's name for it."""
        return self.op.label

    @property
    def duration(self) -> float:
        """Seconds from submission to completion."""
        return self.finished - self.started

"""`ReducerStatus`: what the owner of a reducer may read of it."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.reducer.buckets.layout import BucketLayout
from gradwire.reducer.machine import State


@dataclass(frozen=True, slots=True)
class ReducerStatus:
    """A snapshot of a reducer."""

    state: State
    steps: int
    layout: BucketLayout
    rebuilt: bool
    """Whether the buckets follow the order in which gradients arrive."""
    rebuild_due: bool
    """Whether the buckets will be rebuilt in that order."""
    learning: bool
    """Whether the next backward shows what a static graph uses."""
    order: tuple[str, ...]
    """The parameters in the order in which gradients arrive; empty until it is known."""
    last_arrival: tuple[int, ...]
    """The same of the last step that showed it, by index."""
    graph_seems_static: bool
    """Whether the same parameters got gradients in all steps so far."""
    unused_nbytes: int
    """Bytes of parameters that got no gradient in the last step."""
    buckets_reduced: int
    last_error: str | None
    """The error of the last step that failed."""

    @property
    def in_backward(self) -> bool:
        """Whether a step has begun to reduce and has not ended."""
        return self.state in (State.RUNNING, State.LAUNCHED)

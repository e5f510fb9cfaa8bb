"""`ReducerOptions` and `ReducerStatus`: what the owner of a reducer chooses, and what it may read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.reducer.buckets.layout import BucketLayout
from gradwire.reducer.machine import State


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How a reducer treats gradients and buckets. The defaults are those of torch's DDP."""

    keep_views: bool = False
    """Gradients are views of the buckets once their bucket has been launched."""
    lazy_buckets: bool = False
    """Bucket memory is allocated at launch and released at the end of the step."""
    track_unused: bool = False
    """Ranks exchange in every step which parameters they used."""
    skip_unused: bool = False
    """Buckets none of whose parameters are used are not reduced."""
    rebuild_limits: Sequence[int] | None = None
    """Sizes in bytes of the buckets that are built after the first step, when the order of gradients is known."""


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

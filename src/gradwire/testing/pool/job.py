"""What one call runs on every rank: a function of a `JobContext`, sent to the rank's process. On a group, or on anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch._C._distributed_c10d import Store

from gradwire.groups import Group
from gradwire.groups.base import BuildGroup
from gradwire.testing.pool.outcome import GROUP_MARGIN


class Resource(Protocol):
    """What a job's rank must give up when the job ends, such as a group."""

    def abort(self, reason: str) -> None:
        """This rank or another one has failed: stop waiting."""

    def close(self) -> None:
        """All ranks have answered."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """One rank of a job."""

    rank: int
    size: int
    name: str
    timeout: float
    """Seconds that the job may take; or, if ranks report progress, that it may take without a report."""
    store: Store
    """Where the ranks of this job meet."""
    own: Callable[[Resource | None], None]
    """From now on abort and close this, instead of what was passed before."""
    report: Callable[[Any], None]
    """Send progress to the process that runs the job."""


@dataclass(frozen=True, slots=True)
class GroupJob:
    """Run `fn(wrap(build(...)))`."""

    fn: Callable[[Group], object]
    build: BuildGroup
    wrap: Callable[[Group], Group] | None = None

    def __call__(self, context: JobContext) -> object:
        """On one rank."""
        group = self.build(
            context.store, context.rank, context.size, timeout=context.timeout + GROUP_MARGIN, name=context.name
        )
        context.own(group)
        if self.wrap is not None:
            group = self.wrap(group)
            context.own(group)
        return self.fn(group)

    def __repr__(self) -> str:
        return repr(self.fn)

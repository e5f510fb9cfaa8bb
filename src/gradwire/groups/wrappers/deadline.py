"""`Deadline`: a shorter timeout for every operation."""

from __future__ import annotations

from gradwire.collectives import Collective
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.groups.wrappers.base import GroupWrapper


class Deadline(GroupWrapper):
    """Gives every operation at most `seconds`, then fails it with CollectiveTimeout, which names the missing ranks."""

    def __init__(self, inner: Group, *, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = timeout_seconds(f"Deadline around {inner}", seconds)
        self.timeout = min(self.seconds, inner.timeout)

    def submit(self, op: Collective) -> Work:
        """Submit to the inner group with a shorter timeout."""
        return self.inner.submit(op.within(self.seconds))

    def rewrap(self, inner: Group) -> Group:
        """The same deadline."""
        return Deadline(inner, seconds=self.seconds)

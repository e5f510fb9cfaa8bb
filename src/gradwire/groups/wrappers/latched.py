"""`Latched`: the first failure is final."""

from __future__ import annotations

from gradwire.collectives import Collective
from gradwire.errors import GroupAborted
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.groups.wrappers.base import GroupWrapper


class Latched(GroupWrapper):
    """After one operation has failed, refuses every later one at once, with the first failure as the cause.

    Ranks that are out of step would otherwise match operations that do not belong together, or hang.
    """

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.first_failure: BaseException | None = None

    def submit(self, op: Collective) -> Work:
        """Submit to the inner group, unless an earlier operation has failed."""
        if self.first_failure is not None:
            raise GroupAborted(
                f"{op} on rank {self.rank} of {self.name}: refused, because an earlier operation failed with "
                f"{type(self.first_failure).__name__}: {self.first_failure} Make a new group to continue.",
                reason=str(self.first_failure),
            ) from self.first_failure
        work = self.inner.submit(op)
        work.add_done_callback(self._note)
        return work

    def recover(self, timeout: float | None = None) -> None:
        """Recover the inner group and open the latch."""
        super().recover(timeout)
        self.first_failure = None

    def _note(self, work: Work) -> None:
        if self.first_failure is None:
            self.first_failure = work.exception()

"""Wrappers that pass every operation on: `Deadline` shortens timeouts, `Latched` stops at a failure, `Recording` records."""

from __future__ import annotations

from collections import deque

from gradwire.collectives import Collective, Signature
from gradwire.collectives.timeouts import timeout_seconds
from gradwire.errors import GroupAborted
from gradwire.groups.base import Group
from gradwire.groups.completion import WorkInfo
from gradwire.groups.work import Work
from gradwire.groups.wrappers.base import GroupWrapper


class Deadline(GroupWrapper):
    """Gives every operation at most `seconds`, then fails it with CollectiveTimeout, which names the missing ranks."""

    def __init__(self, inner: Group, *, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = timeout_seconds(f"Deadline around {inner}", seconds)
        self.timeout = min(self.seconds, inner.timeout)

    def submit(self, op: Collective) -> Work:
        return self.inner.submit(op.within(self.seconds))

    def rewrap(self, inner: Group) -> Group:
        return Deadline(inner, seconds=self.seconds)


class Latched(GroupWrapper):
    """After one operation has failed, refuses every later one at once, with the first failure as the cause.

    Ranks that are out of step would otherwise match operations that do not belong together, or hang.
    """

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.first_failure: BaseException | None = None

    def submit(self, op: Collective) -> Work:
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
        super().recover(timeout)
        self.first_failure = None

    def _note(self, work: Work) -> None:
        if self.first_failure is None:
            self.first_failure = work.exception()


class Recording(GroupWrapper):
    """Records what was submitted through it and how it ended: the last `limit` of each, oldest first.

    >>> import torch
    >>> from gradwire.groups import ThreadGroup
    >>> (group,) = map(Recording, ThreadGroup.world(1))
    >>> work = group.all_reduce(torch.zeros(3), label="loss")
    >>> group.submitted
    [Signature(kind=<OpKind.ALL_REDUCE: 'all_reduce'>, shapes=((3,),), dtypes=('float32',), reduce_op=..., label='loss')]
    >>> group.finished[0].kind, group.finished[0].bytes
    ('all_reduce', 12)
    >>> group.close()
    """

    def __init__(self, inner: Group, *, limit: int = 10_000) -> None:
        super().__init__(inner)
        self._limit = limit
        self._submitted: deque[Signature] = deque(maxlen=limit)
        self._finished: deque[WorkInfo] = deque(maxlen=limit)

    @property
    def submitted(self) -> list[Signature]:
        return list(self._submitted)

    @property
    def finished(self) -> list[WorkInfo]:
        """Operations that have finished or failed, in completion order."""
        return list(self._finished)

    def submit(self, op: Collective) -> Work:
        work = self.inner.submit(op)
        self._submitted.append(op.signature)
        work.add_done_callback(lambda done: self._finished.append(done.info))
        return work

    def rewrap(self, inner: Group) -> Group:
        return Recording(inner, limit=self._limit)

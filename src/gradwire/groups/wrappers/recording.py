"""`Recording`: records what was submitted and how it ended."""

from __future__ import annotations

from collections import deque

from gradwire.collectives import Collective, Signature
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.groups.work_info import WorkInfo
from gradwire.groups.wrappers.base import GroupWrapper


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
        """What was submitted, in order."""
        return list(self._submitted)

    @property
    def finished(self) -> list[WorkInfo]:
        """Operations that have finished or failed, in completion order."""
        return list(self._finished)

    def submit(self, op: Collective) -> Work:
        """Record it and submit it to the inner group."""
        work = self.inner.submit(op)
        self._submitted.append(op.signature)
        work.add_done_callback(lambda done: self._finished.append(done.info))
        return work

    def rewrap(self, inner: Group) -> Group:
        """A separate recording."""
        return Recording(inner, limit=self._limit)

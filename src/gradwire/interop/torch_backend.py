"""`GradwireBackend`: a gradwire group as a c10d Backend, which Python can implement since torch 2.15.

Note [A process group and its backend]
What C++ calls on a process group written in Python is forwarded to Python in part; the rest looks for a backend. So since 2.15 ours
has one, over the same group. Where a process group has other backends for other devices ("cpu:gradwire,cuda:nccl"), or torch was
told to record collectives or to check them for NaN, the process group is torch's own and has this backend alone. Of a Work that
passes through it torch forwards only waits and futures: its `is_completed()` is never True, and it has no `result()` and no source.
So it is not the only form.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Backend, Store

from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.interop.c10d_methods import C10dMethods
from gradwire.interop.process_group_base import OverGroup
from gradwire.runtime.dynamo import untraced


def _has_constructor() -> bool:
    try:
        type("Probe", (Backend,), {})(0, 1)
    except TypeError:
        return False
    return True


PYTHON_BACKENDS = _has_constructor()
"""Whether torch lets Python implement backends."""


@untraced
class GradwireBackend(C10dMethods, Backend):
    """A gradwire group in a process group: see Note [A process group and its backend]. `.group` is the gradwire group."""

    supports_splitting = True
    supports_coalescing = True

    def __init__(
        self, group: Group, *, devices: Sequence[str], backend_name: str, coalescing: list[list[Work]] | None = None
    ) -> None:
        Backend.__init__(self, group.rank, group.size)
        OverGroup.__init__(self, group, devices, backend_name, coalescing)
        self._options = Backend.Options(backend_name, timedelta(seconds=group.timeout))

    @property
    def options(self) -> Any:
        """torch copies them for the parts of a split."""
        return self._options

    def split(self, store: Store, ranks: Sequence[int], options: Any) -> GradwireBackend:
        """The backend of these ranks. Only they may call it: torch has no result for the others."""
        ranks = [int(rank) for rank in ranks]
        if self.group.rank not in ranks:
            raise UsageError(
                f"split_group of {self.group} into {ranks} on rank {self.group.rank}: torch needs every rank in one of the parts. "
                "Pass split_ranks that contain all ranks, or use dist.new_group."
            )
        subgroup = self.group.subgroup(ranks, name=self._name_part(self.group.name, ranks))
        part = GradwireBackend(subgroup, devices=self._devices, backend_name=self._backend_name)
        if options is not None:
            part.set_timeout(options._timeout)
        return part

    # C++ calls these without a device.
    start_coalescing = OverGroup._start_coalescing
    end_coalescing = OverGroup._end_coalescing

    def __repr__(self) -> str:
        return f"<{self._backend_name} backend over {self.group}>"

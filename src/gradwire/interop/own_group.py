"""`OwnGroup`: the group that a hook inside torch's DDP communicates over, made when the hook first communicates.

Note [A group of its own]
torch's DDP communicates too: with `find_unused_parameters` it all-reduces the map of used parameters once all buckets have been
launched, from the thread that runs backward. A hook of several collectives is then still at work on its lane, and on one process
group the two would be submitted in an order that differs from rank to rank. So the hook communicates over a duplicate of DDP's
process group, where nothing else is submitted.

Making the duplicate is itself a collective, on the original group, so all ranks must make it at the same point. They do: it is made
by the first bucket that DDP launches (or an earlier call that every rank makes, such as load_hook_state_dict). DDP launches its
buckets in index order on every rank, from the thread of backward, and everything else that it submits in that step comes before
the first bucket (buffers, in forward) or after the last (the map), from the same thread. `split` waits for all ranks before it
returns.

Where collectives are ordered by CUDA streams (NCCL) the whole reduction is enqueued from backward's thread, in the order of the
program, so the original group will do. The same holds for groups that cannot be duplicated: their reductions run to the end
before backward goes on, without overlap.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup


class OwnGroup:
    """Makes the group on first use. See Note [A group of its own]."""

    def __init__(self, given: Group | None, *, doing: str) -> None:
        self.overlaps = True
        """Whether a reduction may go on while torch does: where nobody else uses the group."""
        self._doing = doing
        self._original = given
        self._pg: Any = None
        self._made: Group | None = None

    def original(self, state: Any = None) -> Group:
        """The group that it is made from: as given, or of `state`, a process group as torch's own hooks take it, or of WORLD."""
        if self._original is None:
            if not dist.is_initialized():
                raise UsageError(
                    f"{self._doing}: made without a group, and torch.distributed has none yet. Call dist.init_process_group "
                    "first, or pass group=."
                )
            self._pg = state if isinstance(state, dist.ProcessGroup) else dist.group.WORLD
            inside = getattr(self._pg, "group", None)  # a gradwire group under torch's interface has one
            self._original = inside if isinstance(inside, Group) else C10dGroup(self._pg)
        elif self._pg is not None and isinstance(state, dist.ProcessGroup) and state is not self._pg:
            raise UsageError(
                f"{self._doing}: its first communication was over {self._pg.group_name!r}, and DDP now passes the process group "
                f"{state.group_name!r} as its state. Pass group=gw.from_process_group(pg) to as_torch_hook."
            )
        return self._original

    def get(self, device: torch.device, state: Any = None) -> Group:
        """The group to communicate over. The first call is a collective: every rank makes it at the same point."""
        original = self.original(state)
        if self._made is None:
            self._made = self._duplicate(original, device)
        return self._made

    def _duplicate(self, group: Group, device: torch.device) -> Group:
        if group.size == 1 or group.orders_streams(device):
            return group
        try:
            part = group.split(0)
        except UsageError:  # on every rank alike: it depends on the kind of group only
            self.overlaps = False
            return group
        assert part is not None  # every rank passed a color
        return part

    def close(self) -> None:
        """End what was made here; a group that was given stays open."""
        if self._made is not None and self._made is not self._original:
            self._made.close()
        if (
            self._original is not None
            and self._pg is not None
            and getattr(self._pg, "group", None) is not self._original
        ):
            self._original.close()

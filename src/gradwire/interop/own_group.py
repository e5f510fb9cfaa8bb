"""`OwnGroup`: the group that a hook inside torch's DDP communicates over, made when the hook first communicates.

Note [A group of its own]
torch's DDP communicates too: with `find_unused_parameters` it all-reduces the map of used parameters once all buckets have been
launched, from the thread that runs backward. A hook with several collectives may then still be running on its lane, and on one
process group the order of the two would differ from rank to rank. So the hook communicates over a duplicate of DDP's process group,
where nothing else is submitted.

Making the duplicate is itself a collective, on the original group, so all ranks must make it at the same point. They do: it is made
by the first bucket that DDP launches (or an earlier call that every rank makes, such as load_hook_state_dict). DDP launches its
buckets in index order on every rank, from the thread of backward, and everything else that it submits in that step comes before
the first bucket (buffers, in forward) or after the last (the map), from the same thread. `split` waits for all ranks before it
returns.

Where collectives are ordered by CUDA streams (NCCL) the whole reduction is enqueued from backward's thread, in program order, so
the original group can be used. The same holds for groups that cannot be duplicated: their reductions run to completion before
backward continues, without overlap.
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
        """Whether a reduction may overlap with torch's own work: if nothing else uses the group."""
        self._doing = doing
        self._original = given
        self._pg: Any = None
        self._made: Group | None = None

    def original(self, state: Any = None) -> Group:
        """The group to duplicate: the given one, else that of `state`, a process group as for torch's own hooks, else WORLD's."""
        if self._original is None:
            if not dist.is_initialized():
                raise UsageError(
                    f"{self._doing}: no group was given, and torch.distributed has none yet. Call dist.init_process_group "
                    "first, or pass group=."
                )
            self._pg = state if isinstance(state, dist.ProcessGroup) else dist.group.WORLD
            inside = getattr(self._pg, "group", None)  # set if it is a gradwire group behind torch's API
            self._original = inside if isinstance(inside, Group) else C10dGroup(self._pg)
        elif self._pg is not None and isinstance(state, dist.ProcessGroup) and state is not self._pg:
            raise UsageError(
                f"{self._doing}: its first communication was over {self._pg.group_name!r}, but DDP now passes the process group "
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
        except UsageError:  # the same on every rank: it depends only on the kind of group
            self.overlaps = False
            return group
        assert part is not None  # every rank passed a color
        return part

    def close(self) -> None:
        """Close the duplicate; a group that was given stays open."""
        if self._made is not None and self._made is not self._original:
            self._made.close()
        if (
            self._original is not None
            and self._pg is not None
            and getattr(self._pg, "group", None) is not self._original
        ):
            self._original.close()

"""The default process group: that of `gw.init()`, else torch.distributed's default.

Note [One world in a process]
A model that is built without a group uses the one that `gw.init()` made, which `WORLD` keeps for the whole process, until it is
closed. A forked process is not a rank and finds none; the group it inherited would be torn down twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire.errors import UsageRuntimeError
from gradwire.groups.base import Group
from gradwire.interop.process_group import GradwireProcessGroup, as_process_group


class WorldGroup:
    """The group of this process's world, once there is one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.met = 0
        """How often this process has met the other ranks, successfully or not: the same on every rank."""
        self.kind = ""
        """The kind of the last group."""
        self._group: Group | None = None
        self._process = 0
        self._leave: Callable[[], None] = _nothing
        self._release: Callable[[], None] = _nothing

    def put(self, group: Group, *, kind: str, leave: Callable[[], None], release: Callable[[], None]) -> None:
        """Make `group` the world's group. `leave` closes it; `release` is called after that, or when the next group is put here."""
        self._group, self._process, self.kind, self._leave = group, os.getpid(), kind, leave
        earlier, self._release = self._release, release
        earlier()

    def get(self) -> Group | None:
        """The world's group, if there is one, it is open and it was made in this process."""
        group = self._group
        return group if group is not None and not group.closed and self._process == os.getpid() else None

    def leave(self) -> None:
        """Leave the world, if there is one and it was joined in this process. May be called again."""
        leave, self._leave, self._group = self._leave, _nothing, None
        release, self._release = self._release, _nothing
        if self._process == os.getpid():
            try:
                leave()
            finally:
                release()


def _nothing() -> None:
    pass


WORLD: Final = WorldGroup()
"""See Note [One world in a process]."""


def default_process_group(*, instead: str = "DistributedDataParallel(model, process_group=group)") -> Any:
    """The process group of `gw.init()` or of `dist.init_process_group`. Without one, the error says what to write `instead`."""
    world = WORLD.get()
    if world is not None:
        return as_process_group(world)
    if not dist.is_initialized():
        raise UsageRuntimeError(
            "Default process group has not been initialized, please make sure to call init_process_group, or gw.init(). "
            f"Or pass your own group: {instead}."
        )
    return c10d._get_default_group()


def is_default(pg: Any) -> bool:
    """Whether `pg` is the one that `default_process_group` returns."""
    world = WORLD.get()
    if world is not None:
        return isinstance(pg, GradwireProcessGroup) and pg.group is world
    return dist.is_initialized() and pg is c10d._get_default_group()


def backend_name(pg: Any) -> str:
    """The backend's name as torch reports it."""
    try:
        return str(dist.get_backend(pg))
    except (ValueError, RuntimeError, TypeError):
        return str(getattr(pg, "name", lambda: type(pg).__name__)())

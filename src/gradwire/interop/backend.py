"""`register_backend`: gradwire as a back end of torch.distributed, for `dist.init_process_group("gradwire")`.

Note [Programs that end without destroy_process_group]
Most do. A thread that comes out of an engine's wait when the interpreter has ended takes the process down with it, so every
group made here is closed at interpreter exit. Closing waits a few seconds for what is in flight: a peer that ends at the same
time ends those waits while Python can still take notice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup
from gradwire.interop.process_group import GradwireProcessGroup, as_process_group

Wrap = Callable[[Group], Group]


def register_backend(name: str = "gradwire", *, wrap: Wrap | None = None) -> None:
    """Make `dist.init_process_group(name)` and `dist.new_group(backend=name)` give gradwire groups.

    Every group goes through `wrap` before torch sees it: `register_backend(wrap=Recording)` records what stock DDP does.
    Calling it again is harmless; the last `wrap` counts for groups made from then on. `from_process_group(pg)` gives the
    gradwire group of a process group.

    >>> register_backend()
    >>> dist.is_backend_available("gradwire")
    True
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(
            f"register_backend({name!r}): torch needs a name that is one word. Use letters, digits and '_'."
        )
    plugin = dist.Backend._plugins.get(name.upper())
    ours = plugin is not None and isinstance(plugin.creator_fn, _Creator)
    if name.lower() in dist.Backend.backend_list and not ours:
        raise UsageError(f"register_backend({name!r}): torch.distributed has a back end of this name. Choose another.")
    if wrap is not None and not callable(wrap):
        raise UsageTypeError(
            f"register_backend: wrap is {wrap!r}. Pass a function from Group to Group, or leave it out."
        )
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    dist.Backend.register_backend(
        name, _Creator(name.lower(), wrap, tuple(devices)), extended_api=True, devices=devices
    )


@dataclass(frozen=True, slots=True)
class _Creator:
    """What torch calls for each new group."""

    name: str
    wrap: Wrap | None
    devices: tuple[str, ...]

    def __call__(self, options: Any, backend_options: object) -> GradwireProcessGroup:
        if backend_options is not None:
            raise UsageError(
                f"back end {self.name!r}: pg_options={backend_options!r} is not for it. Leave pg_options out; to wrap the "
                "group use register_backend(wrap=...)."
            )
        group = _engine(
            options.store,
            options.group_rank,
            options.group_size,
            timeout=options.timeout.total_seconds(),
            name=f"{self.name}:{options.group_id}",
            devices=self.devices,
        )
        try:
            seen = group if self.wrap is None else self.wrap(group)
            if not isinstance(seen, Group):
                raise UsageTypeError(
                    f"back end {self.name!r}: wrap returned {seen!r} for {group}. It must return a gradwire Group."
                )
        except BaseException:
            group.close(timeout=0.0)
            raise
        weakref.finalize(seen, _leave, weakref.ref(seen))
        return as_process_group(seen, devices=self.devices, backend_name=self.name, store=options.store)


def _leave(group: weakref.ref[Group]) -> None:
    """At interpreter exit; when the group was dropped before, there is nothing left to close."""
    alive = group()
    if alive is not None:
        alive.close()


def _engine(store: Store, rank: int, size: int, *, timeout: float, name: str, devices: tuple[str, ...]) -> Group:
    """The group that moves the bytes of the registered back end: the one place that chooses it."""
    return C10dGroup.gloo(store, rank, size, timeout=timeout, name=name)

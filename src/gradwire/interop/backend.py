"""`register_backend`: gradwire as a torch.distributed backend, for `dist.init_process_group("gradwire")`.

A thread that returns from an engine's wait after the interpreter has shut down crashes the process, so every group made here is
closed at interpreter exit, where most programs do not call destroy_process_group. Closing waits a few seconds for operations in
flight: if a peer exits at the same time, those waits end while Python can still handle it.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups.base import BuildGroup, Group
from gradwire.groups.kinds import GroupKind, find_kind, known_kinds
from gradwire.groups.store.private_store import mark_used, move_if_together, release
from gradwire.hooks.base import CommHook
from gradwire.interop.hooked_group import HookedGroup, check_gradient_hook
from gradwire.interop.process_group import PYTHON_BACKENDS, GradwireBackend, GradwireProcessGroup, as_process_group
from gradwire.runtime.threads import weakly

Wrap = Callable[[Group], Group]


def register_backend(
    name: str = "gradwire", *, kind: str | BuildGroup = "gloo", wrap: Wrap | None = None, hook: CommHook | None = None
) -> None:
    """Make `dist.init_process_group(name)` and `dist.new_group(backend=name)` create gradwire groups.

    `kind` moves the bytes: "gloo"; "shared_memory", for processes of one host; "hierarchical", for several hosts; "mpi", for
    processes that one mpirun has started; one of your own (`register_kind`); or a function that makes a group,
    `kind(store, rank, size, timeout=..., name=...)`.

    Every group is passed through `wrap` before torch sees it: `register_backend(wrap=Recording)` records what stock DDP does.
    With `hook`, gradients are reduced by it: it is short for `wrap=lambda group: HookedGroup(group, hook)`.
    It may be called again; the last `wrap` and `kind` apply to groups made from then on.
    `from_process_group(pg)` returns the gradwire group of a process group.

    >>> register_backend()
    >>> dist.is_backend_available("gradwire")
    True
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"register_backend({name!r}): torch needs a one-word name. Use letters, digits and '_'.")
    plugin = dist.Backend._plugins.get(name.upper())
    ours = plugin is not None and plugin.creator_fn.__module__.partition(".")[0] == "gradwire"
    if name.lower() in dist.Backend.backend_list and not ours:
        raise UsageError(
            f"register_backend({name!r}): torch.distributed already has a backend of this name. Choose another."
        )
    if wrap is not None and not callable(wrap):
        raise UsageTypeError(f"register_backend: wrap is {wrap!r}. Pass a function from Group to Group, or omit it.")
    if hook is not None:
        if wrap is not None:
            raise UsageError(
                "register_backend(wrap=..., hook=...): pass one. HookedGroup(group, hook) in wrap has both."
            )
        check_gradient_hook(f"register_backend({name!r}, hook=...)", hook)
        wrap = partial(HookedGroup, hook=hook)
    creator = creator_of(name.lower(), kind, wrap)
    # torch 2.15 attaches a recorder to the C++ half of every group except those of these backends. Python does not pass through it.
    recorded: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    (recorded.discard if _torch_watches() else recorded.add)(name.lower())
    dist.Backend.register_backend(name, creator, extended_api=True, devices=list(creator.devices))


def creator_of(name: str, kind: str | BuildGroup = "gloo", wrap: Wrap | None = None) -> _Creator:
    """What torch calls for each new group of the backend `name`."""
    if isinstance(kind, str):
        known = find_kind(kind, who=f"register_backend(kind={kind!r})")
    elif callable(kind):
        known = GroupKind(getattr(kind, "__name__", repr(kind)), kind)
    else:
        raise UsageTypeError(
            f"register_backend: kind is {kind!r}. Pass one of {', '.join(known_kinds())}, or a function that makes a group."
        )
    devices = ("cpu", "cuda") if known.on_cuda and torch.cuda.is_available() else ("cpu",)
    return _Creator(name, known.build, wrap, devices)


@dataclass(frozen=True, slots=True)
class _Creator:
    """See `creator_of`."""

    name: str
    build: BuildGroup
    wrap: Wrap | None
    devices: tuple[str, ...]

    def __call__(self, options: Any, backend_options: object) -> GradwireProcessGroup | GradwireBackend:
        if backend_options is not None:
            raise UsageError(
                f"backend {self.name!r}: pg_options={backend_options!r} is not supported. Omit pg_options; to wrap the "
                "group use register_backend(wrap=...)."
            )
        rank, size, timeout = options.group_rank, options.group_size, options.timeout.total_seconds()
        name = f"{self.name}:{options.group_id}"
        who = f"{name} on rank {rank} of {size}"
        store = move_if_together(options.store, rank, size, purpose=name, timeout=timeout, who=who)
        try:
            group = self._checked(
                self.build(store, rank, size, timeout=timeout, name=name), "the function that makes its groups"
            )
            if store is not options.store:
                mark_used(store, rank)
        except BaseException:
            release(store)
            raise
        # Created before the finalizer that closes the group, so that at exit it runs after it.
        weakref.finalize(group, release, store)
        try:
            seen = group if self.wrap is None else self._checked(self.wrap(group), f"wrap, given {group},")
        except BaseException:
            group.close(timeout=0.0)
            raise
        weakref.finalize(seen, weakly(seen.close))
        if PYTHON_BACKENDS and (_torch_watches() or not _alone(self.name)):
            return GradwireBackend(seen, devices=self.devices, backend_name=self.name)
        return as_process_group(seen, devices=self.devices, backend_name=self.name, store=options.store)

    def _checked(self, group: object, maker: str) -> Group:
        if not isinstance(group, Group):
            raise UsageTypeError(f"backend {self.name!r}: {maker} returned {group!r}. It must return a gradwire Group.")
        return group


def _torch_watches() -> bool:
    """Whether torch was told, by its own variables, to look at every collective. Its hooks see those that pass through C++."""
    size = os.environ.get("TORCH_FR_BUFFER_SIZE", "")
    return os.environ.get("TORCH_DIST_NAN_CHECK") == "1" or (size.isdecimal() and int(size) > 0)


def _alone(name: str) -> bool:
    """Whether this is the only backend of the process group that torch is making. torch passes that on to no one."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "backend_config" not in frame.f_locals:
        frame = frame.f_back
    config = None if frame is None else frame.f_locals["backend_config"]
    return config is None or set(config.get_device_backend_map().values()) == {name}

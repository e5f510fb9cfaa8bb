"""The registry of group kinds: the names that `gw.init`, `register_backend`, `run_ranks` and the command line accept.

An installed package can provide kinds without being imported, by an entry point of the group `gradwire.groups`. The entry point's
name is the kind's name, and it refers to a GroupKind or to a function that makes a group:

    [project.entry-points."gradwire.groups"]
    mine = "my_package:build_mine"

It is loaded only when its kind is requested, so one that cannot be loaded does not affect other kinds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from torch._C._distributed_c10d import HashStore

from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.groups.base import BuildGroup, Group
from gradwire.groups.c10d import C10dGroup
from gradwire.groups.hierarchical import HierarchicalGroup
from gradwire.groups.mpi import MPIGroup
from gradwire.groups.shared_memory import SharedMemoryGroup
from gradwire.groups.threads_group import ThreadGroup

ENTRY_POINTS = "gradwire.groups"


class Ranks(Enum):
    """What the ranks of a group are, and so how `run_ranks` starts them."""

    PROCESSES = "processes"
    """Processes, started in any way. One can die while the others live."""
    MPI = "MPI processes"
    """Processes that one mpirun has started. When one dies, mpirun ends all."""
    THREADS = "threads"
    """Threads of one process. `build` is called for one rank after another, with the same HashStore, and must not wait."""


@dataclass(frozen=True, slots=True)
class GroupKind:
    """A kind of group that can be requested by name."""

    name: str
    build: BuildGroup
    """Makes one rank's group: `build(store, rank, size, timeout=..., name=...)`. No other group uses `store`."""
    ranks: Ranks = Ranks.PROCESSES
    on_cuda: bool = True
    """Whether it accepts CUDA tensors: `register_backend` then registers it with torch for them."""
    needs_gpu: bool = False
    """Whether every rank needs a CUDA device."""
    shares_memory: bool = False
    """Whether `build` takes `directory=` and `room=` as well, as SharedMemoryGroup does."""
    default_when: Callable[[int, int | None], bool] = lambda size, local_size: False
    """Whether `gw.init()` picks it by default for `size` ranks, `local_size` of them (None: unknown) on this host. Registered kinds
    come before gradwire's own, the last registered first. Rank 0 decides."""


def register_kind(kind: GroupKind) -> Handle:
    """Register a kind of group under its name. The handle removes it.

    >>> def build(store, rank, size, *, timeout, name):
    ...     return Recording(C10dGroup.gloo(store, rank, size, timeout=timeout, name=name))
    >>> from gradwire.groups import Recording
    >>> with register_kind(GroupKind("recorded gloo", build)):
    ...     "recorded gloo" in known_kinds()
    True
    """
    if not isinstance(kind, GroupKind) or not isinstance(kind.name, str) or not callable(kind.build):
        raise UsageTypeError(f"register_kind({kind!r}): pass GroupKind(name, build), a string and a function.")
    if not kind.name or kind.name == AUTO or kind.name in _KINDS:
        known = f"already registered, as {_KINDS[kind.name]}" if kind.name in _KINDS else "not allowed"
        raise UsageError(f"register_kind({kind}): the name {kind.name!r} is {known}. Choose another.")
    _KINDS[kind.name] = kind
    return Handle(partial(_KINDS.__delitem__, kind.name))


def registered_kinds() -> tuple[GroupKind, ...]:
    """gradwire's own kinds and those of `register_kind`."""
    return tuple(_KINDS.values())


def known_kinds() -> tuple[str, ...]:
    """The names of all kinds: gradwire's own, registered ones, and those of entry points, which may fail to load."""
    provided = (point.name for point in entry_points(group=ENTRY_POINTS) if point.name != AUTO)
    return tuple(dict.fromkeys((*_KINDS, *provided)))


def find_kind(name: str, *, who: str, also: Sequence[str] = ()) -> GroupKind:
    """The kind of that name, requested by `who`. UsageError, which lists `also` as known, if it is unknown or fails to load."""
    if isinstance(name, str) and name in _KINDS:
        return _KINDS[name]
    points = list(entry_points(group=ENTRY_POINTS, name=name)) if isinstance(name, str) and name != AUTO else []
    if not points:
        raise UsageError(f"{who}: there is no such kind. Known kinds: {', '.join((*also, *known_kinds()))}.")
    if len(points) > 1:
        which = ", ".join(map(_described, points))
        raise UsageError(f"{who}: several packages provide this kind: {which}. Uninstall all but one.")
    point = points[0]
    try:
        found: Any = point.load()
    except (Exception, SystemExit) as error:  # a module may call sys.exit() when it is imported
        raise UsageError(
            f"{who}: the entry point {_described(point)} cannot be loaded: {type(error).__name__}: {error}. Fix or uninstall "
            "the package that provides it."
        ) from error
    if isinstance(found, GroupKind):
        return found
    if not callable(found):
        raise UsageTypeError(
            f"{who}: the entry point {_described(point)} is {found!r}. It must refer to a GroupKind, or to a function that makes "
            "a group."
        )
    return GroupKind(point.name, found)


def check_built(group: Any, kind: GroupKind, *, who: str) -> Group:
    """Return what a kind's `build` returned, if it is a group; raise otherwise."""
    if not isinstance(group, Group):
        raise UsageTypeError(f"{who}: the kind {kind.name!r} returned {group!r}, which is not a gradwire Group.")
    return group


def _described(point: EntryPoint) -> str:
    package = "" if point.dist is None else f" of {point.dist.name} {point.dist.version}"
    return f"{point.name} = {point.value}{package}"


def default_kind(size: int, local_size: int | None) -> str:
    """The default kind of `gw.init()` for CPU tensors and a world of `size` ranks, `local_size` of them on this host.

    >>> default_kind(1, 1), default_kind(4, 4), default_kind(4, 2), default_kind(4, None)
    ('threads', 'shared_memory', 'hierarchical', 'gloo')
    """
    others = registered_kinds()[len(_OWN) :]
    return next(kind.name for kind in (*reversed(others), *_OWN) if kind.default_when(size, local_size))


def _threads(store: Any, rank: int, size: int, *, timeout: float, name: str) -> Group:
    if size == 1:
        return ThreadGroup.world(1, timeout=timeout, name=name)[0]
    if not isinstance(store, HashStore):
        others = ", ".join(kind.name for kind in registered_kinds() if kind.ranks is not Ranks.THREADS)
        problem = f"kind 'threads' on rank {rank} of {size}: all ranks must be threads of one process"
        raise UsageError(f"{problem}. Choose another kind: {others}.")
    if store not in _THREADS:
        _THREADS[store] = ThreadGroup.world(size, timeout=timeout, name=name)
    return _THREADS[store][rank]


_THREADS: weakref.WeakKeyDictionary[HashStore, list[ThreadGroup]] = weakref.WeakKeyDictionary()
"""The groups of worlds whose ranks are built one after another."""


def _hierarchical(store: Any, rank: int, size: int, *, timeout: float, name: str, **memory: Any) -> Group:
    inside = partial(SharedMemoryGroup, **memory)
    return HierarchicalGroup.discover(store, rank, size, timeout=timeout, name=name, inside=inside)


AUTO = "auto"
"""Not a kind: stands for the default."""
_OWN = (
    GroupKind("threads", _threads, Ranks.THREADS, default_when=lambda size, local: size == 1),
    GroupKind("shared_memory", SharedMemoryGroup, shares_memory=True, default_when=lambda size, local: size == local),
    GroupKind("hierarchical", _hierarchical, shares_memory=True, default_when=lambda size, local: (local or 0) > 1),
    GroupKind("gloo", C10dGroup.gloo, default_when=lambda size, local: True),
    GroupKind("nccl", C10dGroup.nccl, needs_gpu=True),
    GroupKind("mpi", MPIGroup.over_store, Ranks.MPI, on_cuda=False),
)
_KINDS = {kind.name: kind for kind in _OWN}

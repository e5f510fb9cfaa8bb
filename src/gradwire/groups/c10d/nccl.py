"""Makes NCCL engines.

Note [A store that needs no interpreter]
Threads of NCCL's engine call its store for as long as it lives. A private store is written in Python: such a call waits for the
interpreter lock, which may be held by a thread that is destroying the engine and joining its threads. So the engine gets one of
torch's C++ stores, over a separate private file: each rank opens that file by its name, which it finds in the private store.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from gradwire.groups.c10d.gloo import ENGINE_MARGIN, make_gloo
from gradwire.groups.failure.store_calls import innermost
from gradwire.groups.store.private_store import PrivateStore
from gradwire.groups.store.rendezvous import MemberProcess
from gradwire.runtime.private_file import create, name_of, open_private

_NAME = "gradwire/nccl"
_LABEL = "gradwire-nccl-store"


def make_nccl(store: Any, rank: int, size: int, timeout: float) -> tuple[Any, Mapping[int, MemberProcess]]:
    """A process group of all ranks that have met in `store`, NCCL for CUDA tensors and gloo for others; and their processes."""
    kinds, nccl = dist.ProcessGroup.BackendType, dist.ProcessGroupNCCL
    cpu, processes = make_gloo(store, rank, size, timeout)
    store, fd = _without_interpreter(store, rank, timeout)
    try:
        pg = dist.ProcessGroup(PrefixStore("c10d", store), rank, size)
        options = nccl.Options()
        options._timeout = timedelta(seconds=timeout + ENGINE_MARGIN)
        pg._set_default_backend(kinds.NCCL)
        pg._register_backend(torch.device("cuda"), kinds.NCCL, nccl(PrefixStore("nccl", store), rank, size, options))
        pg._register_backend(torch.device("cpu"), kinds.GLOO, cpu)
    except BaseException:
        if fd is not None:
            os.close(fd)
        raise
    if fd is not None:
        weakref.finalize(pg, os.close, fd).atexit = False  # the engine may still exist at exit
    return pg, processes


def _without_interpreter(store: Any, rank: int, timeout: float) -> tuple[Any, int | None]:
    """A pure C++ store for the same ranks, and the descriptor it needs. See Note [A store that needs no interpreter]."""
    if not isinstance(innermost(store), PrivateStore):
        return store, None
    fd = create(_LABEL) if rank == 0 else open_private(store.get(_NAME).decode(), _LABEL)
    try:
        if rank == 0:
            os.ftruncate(fd, 0)
            store.set(_NAME, name_of(fd))
        native = FileStore(f"/proc/self/fd/{fd}", -1)
        native.set_timeout(timedelta(seconds=timeout))
    except BaseException:
        os.close(fd)
        raise
    return native, fd

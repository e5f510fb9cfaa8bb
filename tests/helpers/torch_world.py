"""Worlds of torch.distributed on the ranks of a group.

Note [The last owner of torch's group]
When ProcessGroupGloo ends it joins its threads, one of which may need the interpreter lock to drop a tensor of a Work that has just
ended. If its last owner is a Python object, the lock is released meanwhile; if it is torch's reducer, it is not, and both wait for
ever. A test's model may live longer than the world, so the group of ranks keeps a reference until it is closed.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

import gradwire as gw

PATIENCE = timedelta(seconds=120)


@contextmanager
def initialised(
    backend: str, store: dist.Store, rank: int, size: int, *, kind: str = "gloo", timeout: timedelta = PATIENCE
) -> Iterator[None]:
    """`dist` over `store`, until the end of the block."""
    torch.set_num_threads(1)
    gw.register_backend(kind=kind)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def torch_world(group: gw.Group, backend: str, *, kind: str = "gloo", timeout: timedelta = PATIENCE) -> Iterator[None]:
    """`dist` initialised on every rank of `group`, with a store of its own; everything is gone afterwards."""
    importlib.import_module("torch.distributed.nn.functional")  # its defaults keep the WORLD of the first import alive
    port = torch.zeros(1, dtype=torch.int64)
    store = None
    if group.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        port[0] = store.port
    group.broadcast(port, 0)
    store = store or dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=PATIENCE)
    with initialised(backend, store, group.rank, group.size, kind=kind, timeout=timeout):
        if backend == "gloo":  # see Note [The last owner of torch's group]
            group.torchs_world = dist.group.WORLD  # type: ignore[attr-defined]
        yield
    group.barrier()  # rank 0 holds the store's server; it stays until all have gone

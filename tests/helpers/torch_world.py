"""Worlds of torch.distributed on the ranks of a group."""

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
        yield
    group.barrier()  # rank 0 holds the store's server; it stays until all have gone

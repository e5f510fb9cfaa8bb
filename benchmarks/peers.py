"""torch's side of the benchmarks: its process groups, its gloo collectives, and wrappers with its DDP and with ours.

The only module of the benchmarks that uses torch.distributed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # if torch's DDP imports it later, its default arguments keep the process group alive
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, Store

from gradwire.errors import UsageError
from gradwire.groups import Group
from gradwire.groups.store.rendezvous import host_store
from gradwire.parallel import DistributedDataParallel
from gradwire.policies import NonFinite

BARE = "bare"
TORCH = "torch"
OURS = "gradwire"
VIEWS = ", views"
CHECKED = " checked"
AGAIN = ", again"
WAITING = ", waiting"

Wrapper = Callable[[nn.Module], nn.Module]


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """torch's default process group with this process as the only rank: NCCL on a CUDA device, gloo on the CPU."""
    if dist.is_initialized():
        raise UsageError("a comparison with torch needs its own process group, but this process already has one.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        store: Store = host_store()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def torch_world(backend: str, store: Store, rank: int, size: int, *, timeout: float) -> Iterator[None]:
    """torch's default process group, as `dist.init_process_group(backend)` makes it."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    try:
        yield
    finally:
        dist.destroy_process_group()


def gloo_calls(full: Tensor, part: Tensor, other: Tensor) -> dict[str, Callable[[], Any]]:
    """Every operation on these buffers, on the default process group: see `contenders.Buffers`."""
    return {
        "all_reduce": lambda: dist.all_reduce(full),
        "broadcast": lambda: dist.broadcast(full, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(full, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
        "all_to_all": lambda: dist.all_to_all_single(other, full),
    }


def wrappers(group: Group | None = None) -> Mapping[str, Wrapper]:
    """The compared wrappers, with torch's default flags and with gradients in buckets. torch's DDP runs on the default process
    group; ours on `group`, or on the same one."""
    torchs, ours = nn.parallel.DistributedDataParallel, DistributedDataParallel
    return {
        BARE: lambda model: model,
        TORCH: torchs,
        OURS: lambda model: ours(model, process_group=group),
        TORCH + VIEWS: lambda model: torchs(model, gradient_as_bucket_view=True),
        OURS + VIEWS: lambda model: ours(model, process_group=group, gradient_as_bucket_view=True),
    }


def checked_wrappers(*, waiting: bool) -> Mapping[str, Wrapper]:
    """Our wrapper without and with a check for NaN and infinity, on the default process group, each twice; if `waiting`, also one
    to which no optimizer will be attached.

    Models that are alike may differ by more than the check takes, depending on where their memory is: so there are two of each,
    and the one without the check comes first and last.
    """
    plain, checked = ("", NonFinite.PASS), (CHECKED, NonFinite.RAISE)
    found: dict[str, Wrapper] = {
        OURS + views + name + again: functools.partial(
            DistributedDataParallel, gradient_as_bucket_view=bool(views), nonfinite=policy
        )
        for views in ("", VIEWS)
        for (name, policy), again in ((plain, ""), (checked, ""), (checked, AGAIN), (plain, AGAIN))
    }
    if waiting:
        found[OURS + CHECKED + WAITING] = found[OURS + CHECKED]
    return found


def unwrap(model: nn.Module) -> nn.Module:
    """Remove our wrapper: end the threads of its group."""
    if isinstance(model, DistributedDataParallel):
        model.replica.detach()
        model.group.close()
        return model.module
    return model

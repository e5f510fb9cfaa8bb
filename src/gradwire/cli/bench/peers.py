"""A world of one rank, and the wrappers around a model that are compared in it: none, torch's and ours.

The one module of the benchmarks that names torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from gradwire.errors import UsageError
from gradwire.parallel import DistributedDataParallel

BARE = "bare"
TORCH = "torch"
OURS = "gradwire"
VIEWS = ", views"

Wrapper = Callable[[nn.Module], nn.Module]


@contextmanager
def world_of_one(device: torch.device) -> Iterator[None]:
    """torch's default process group with this process alone in it: NCCL on a CUDA device, gloo on the CPU."""
    if dist.is_initialized():
        raise UsageError("a benchmark beside torch needs a process group of its own, but this process has one already.")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        store: Store = TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrappers() -> Mapping[str, Wrapper]:
    """What is compared. Both DDPs run on the same process group, with torch's defaults and with gradients in buckets."""
    torchs, ours = nn.parallel.DistributedDataParallel, DistributedDataParallel
    return {
        BARE: lambda model: model,
        TORCH: torchs,
        OURS: ours,
        TORCH + VIEWS: lambda model: torchs(model, gradient_as_bucket_view=True),
        OURS + VIEWS: lambda model: ours(model, gradient_as_bucket_view=True),
    }


def unwrap(model: nn.Module) -> nn.Module:
    """Take ours off: end the threads of its group."""
    if isinstance(model, DistributedDataParallel):
        model.replica.detach()
        model.group.close()
        return model.module
    return model

"""CUDA, NCCL and torch's optimizers open files, pipes and sockets for the life of the process; here they do so before anything is
checked."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda_and_nccl_are_awake() -> None:
    if not torch.cuda.is_available():
        return
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3, device="cuda"))
    dist.all_reduce(torch.ones(3))  # gloo makes its device with the first operation
    (torch.ones(4, 4, device="cuda") @ torch.ones(4, 4, device="cuda")).sum().item()
    torch.optim.SGD(
        [torch.zeros(1, device="cuda", requires_grad=True)], lr=0.1
    ).step()  # imports what keeps a port open
    torch.cuda.synchronize()
    dist.destroy_process_group()

"""Gradients on a CUDA device: those of torch's DDP where they are undefined or recomputed, and the memory of bucket views."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from equivalence import test_gradient_arrival as arrival
from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel
from gradwire.testing import run_ranks
from helpers.torch_world import torch_world

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("program", arrival.PROGRAMS)
def test_the_gradients_of_torchs_ddp(program: str) -> None:
    def rank_main(group: Group) -> dict[str, Any]:
        with torch_world(group, "gloo"):
            return arrival.outcomes(program, group.rank, "cuda")

    for done in run_ranks(rank_main, 2, kind="gloo"):
        for flags, (torchs, ours) in done.items():
            assert not isinstance(torchs, str), (flags, torchs)
            assert not isinstance(ours, str), (flags, ours)
            assert arrival.differences(torchs, ours) == [], flags


def test_bucket_views_need_no_more_memory_than_torchs(nccl: Group) -> None:
    """What a steady step allocates at its peak, beyond what was there before it."""

    def extra_peak(wrap: Callable[[nn.Module], nn.Module]) -> int:
        ddp = wrap(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(12))).cuda())
        x, peaks = torch.randn(8, 4096, device="cuda"), []
        for _ in range(4):
            ddp.zero_grad(set_to_none=False)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ddp(x).sum().backward()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        return peaks[-1]

    found = []
    for wrap in (
        lambda model: TorchDDP(model, gradient_as_bucket_view=True),
        lambda model: DistributedDataParallel(model, process_group=nccl, gradient_as_bucket_view=True),
    ):
        found.append(extra_peak(wrap))
        gc.collect()
    torchs, ours = found
    gradients = 12 * 4 * (4096 * 4096 + 4096)
    print(
        f"extra peak: torch {torchs / 2**20:.0f} MiB, gradwire {ours / 2**20:.0f} MiB, gradients {gradients / 2**20:.0f} MiB"
    )
    assert ours <= torchs + gradients // 10

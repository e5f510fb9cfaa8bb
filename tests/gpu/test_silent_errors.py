"""Checks for silent errors on CUDA: where values may be read, and digests that are the CPU's. Skipped without a device."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gradwire import DivergenceCheck
from gradwire.errors import NonFiniteGradient, Origin
from gradwire.groups import C10dGroup, Group
from gradwire.hooks import cast, chain, mean
from gradwire.parallel import replicate
from gradwire.parallel.digest import digest
from gradwire.policies import Gradients, NonFinite
from gradwire.reducer.nonfinite_search import Search
from gradwire.testing.simulate import one_parameter

pytestmark = pytest.mark.gpu


@pytest.fixture
def nccl() -> Iterator[Group]:
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    group = C10dGroup(dist.group.WORLD)
    yield group
    group.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("keep", [False, True], ids=["set_to_none", "kept"])
@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
def test_nonfinite_gradients(nccl: Group, gradients: Gradients, keep: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).cuda()
    hook = chain(cast(torch.float16), mean())
    replica = replicate(model, group=nccl, hook=hook, nonfinite=NonFinite.RAISE, gradients=gradients)
    for factor, origin in ((1.0, None), (math.nan, Origin.GRADIENT), (1e9, Origin.OVERFLOW), (1.0, None)):
        model.zero_grad(set_to_none=not keep)
        loss = model(torch.ones(2, 4, device="cuda")).sum() * factor
        if origin is None:
            loss.backward()
            continue
        with pytest.raises(NonFiniteGradient) as caught:
            loss.backward()
        assert (caught.value.rank, caught.value.origin) == (0, origin)
        assert caught.value.parameter is not None
    replica.detach()


def test_looking_does_not_wait_for_the_device() -> None:
    flat = torch.ones(1000, device="cuda")
    spec = one_parameter(flat)
    search = Search(spec.names)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        look = search.after(spec, flat)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert look is not None
    assert look.find() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_digests_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (3,), (1001,), (1 << 17, 3)):
        t = torch.randint(-100, 100, shape).to(dtype)
        assert int(digest(t.cuda())) == int(digest(t))


def test_divergence_over_nccl(nccl: Group) -> None:
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters())  # its counters are on the CPU
    model(torch.ones(1, 3, device="cuda")).sum().backward()
    optimizer.step()
    assert DivergenceCheck(model, nccl, optimizer=optimizer).check() == []

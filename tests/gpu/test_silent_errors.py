"""Checks for silent errors on CUDA: where values may be read, and digests that are the CPU's. Skipped without a device."""

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType

from gradwire import DivergenceCheck
from gradwire.collectives.finite import max_norms
from gradwire.errors import NonFiniteGradient, Origin
from gradwire.groups import Group
from gradwire.hooks import cast, chain, mean
from gradwire.parallel import replicate
from gradwire.parallel.divergence import digest
from gradwire.policies import Buckets, Gradients, NonFinite

pytestmark = pytest.mark.gpu


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


@pytest.mark.parametrize("keep", [False, True], ids=["set_to_none", "kept"])
@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
@pytest.mark.parametrize("policy", [NonFinite.RAISE, NonFinite.SKIP])
def test_the_device_skips_bad_steps(nccl: Group, gradients: Gradients, keep: bool, policy: NonFinite) -> None:
    """The host reads the result in the next step, and never waits in between."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 1)).cuda()
    model.to(memory_format=torch.channels_last)
    buckets = Buckets(limits=(1024,))
    hook = chain(cast(torch.float16), mean())
    replica = replicate(model, group=nccl, hook=hook, nonfinite=policy, gradients=gradients, buckets=buckets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    replica.attach_optimizer(optimizer)
    bad = {
        3: (math.nan, Origin.GRADIENT),
        6: (1e9, Origin.OVERFLOW),
        7: (-math.inf, Origin.GRADIENT),
        11: (1e9, Origin.OVERFLOW),
    }
    named = dict(model.named_parameters())
    reported: list[NonFiniteGradient] = []
    for step in range(14):
        optimizer.zero_grad(set_to_none=not keep)
        before = [p.detach().clone() for p in model.parameters()]
        loss = model(torch.ones(2, 2, 4, 4, device="cuda")).sum()
        if step in bad:
            loss = loss + 0 * loss.detach()
            named["2.weight"].register_hook(_poison_once(bad[step][0], (7, 5)))
        if step - 1 in bad and policy is NonFinite.RAISE and step - 1 != 7:
            with pytest.raises(NonFiniteGradient) as caught:
                loss.backward()
            reported.append(caught.value)
            assert caught.value.step == step - 1
            assert (caught.value.parameter, caught.value.index) == ("2.weight", None)
            assert (caught.value.rank, caught.value.origin) == (0, bad[step - 1][1])
            continue
        torch.cuda.set_sync_debug_mode("error" if step > 2 and not {step - 1, step - 2} & set(bad) else "default")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss.backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == (step not in bad)
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert len(reported) == (3 if policy is NonFinite.RAISE else 0)
    replica.finish_checks()
    replica.detach()


@pytest.fixture(scope="module")
def profiled() -> None:
    """The first profile of a process opens files that stay open."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()


@pytest.mark.usefixtures("profiled")
@pytest.mark.parametrize("gradients", Gradients, ids=lambda g: g.value)
def test_a_healthy_check_runs_where_the_optimizer_does(nccl: Group, gradients: Gradients) -> None:
    """Kernels that wait on another stream may slow down every launch: see docs/design.md."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).cuda()
    limits = Buckets(limits=(4 * 64 * 64,))
    replica = replicate(model, group=nccl, nonfinite=NonFinite.RAISE, gradients=gradients, buckets=limits)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    replica.attach_optimizer(optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    launched = [(e.name(), e.device_resource_id()) for e in events if e.device_type() == DeviceType.CUDA]
    assert any("norm" in name.lower() for name, _ in launched)
    assert len({stream for _, stream in launched}) == 1
    replica.finish_checks()
    replica.detach()


def _poison_once(value: float, place: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    done: list[bool] = []

    def poison(grad: Tensor) -> Tensor:
        if done:
            return grad
        done.append(True)
        grad = grad.clone()
        grad.select(0, place[0]).select(0, place[1]).fill_(value)  # does not wait for the device, as an index would
        return grad

    return poison


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_norms_are_those_of_the_cpu_and_do_not_wait_for_the_device(dtype: torch.dtype) -> None:
    """torch's foreach norm must pass NaN on, whatever the size and alignment."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 200_000, (40,), generator=generator).tolist()
    tensors = [torch.randn(size + k % 3, generator=generator).to(dtype)[k % 3 :] for k, size in enumerate(sizes)]
    for k, tensor in enumerate(tensors):
        for value in ((), (math.nan,), (math.inf,), (-math.inf, math.nan), (60000.0,))[k % 5]:
            tensor[int(torch.randint(0, len(tensor), (), generator=generator))] = value
    on_device = [torch.cat([t[:1], t]).cuda()[1:] for t in tensors]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        norms = max_norms(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(
        torch.stack(norms).cpu(), torch.stack(max_norms(tensors)), rtol=0, atol=0, equal_nan=True
    )


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

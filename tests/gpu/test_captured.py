"""Captured reductions on a GPU: bit for bit what the same hook computes eagerly. See also tests/unit/reducer/test_captured.py."""

import itertools

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.groups import Group
from gradwire.hooks import BucketSpec, CommHook, Turn, capture
from gradwire.hooks.combinators import feedback
from gradwire.hooks.numerics.elementwise import drop_nonfinite_
from gradwire.parallel import DistributedDataParallel
from gradwire.reducer.hook.cuda_graphs import CapturedReductions
from gradwire.reducer.hook.driver import Driver
from tests.unit.reducer.test_captured import HOOKS as ON_CPU
from tests.unit.reducer.test_captured import Own

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedReductions, "enabled", True)


HOOKS = ON_CPU | {
    "top_k": hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.01)),
    "dgc": hooks.dgc(0.01, clip=1.0, warmup_steps=3),
}


def _model(group: Group, hook: CommHook, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128) for _ in range(6)]
    ddp = DistributedDataParallel(
        torch.nn.Sequential(*layers).to("cuda", dtype), process_group=group, bucket_cap_mb=0.15
    )
    ddp.set_hook(hook)
    return ddp


def _step(ddp: DistributedDataParallel, step: int, factor: float = 1.0) -> list[Tensor]:
    ddp.zero_grad()
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step)).to(next(ddp.parameters()))
    (ddp(x).square().mean() * factor).backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def _graphs(ddp: DistributedDataParallel) -> int:
    return sum(bool(bucket.segments) for bucket in ddp.replica.runner.driver.captured._buckets.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HOOKS)
def test_captured_gives_the_bits_of_eager(nccl: Group, name: str, dtype: torch.dtype) -> None:
    """With a NaN, an accumulated step, a saved and loaded state and a second model in between."""
    captured, eager = (_model(nccl, hook, dtype) for hook in (HOOKS[name], capture(HOOKS[name], enabled=False)))
    second = _model(nccl, HOOKS[name], dtype)
    for step in range(24):
        factor = float("nan") if step == 8 else 1.0
        if step == 10:
            for ddp in (captured, eager):
                with ddp.no_sync():
                    _step(ddp, 100)
        if step == 12:
            assert _graphs(captured) >= 2
            for ddp in (captured, eager):
                ddp.load_hook_state_dict(ddp.hook_state_dict())
        found, wanted = _step(captured, step, factor), _step(eager, step, factor)
        _step(second, step + 7)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert _graphs(captured) >= 2
    assert not _graphs(eager)


@pytest.mark.parametrize("hook", [*HOOKS.values(), hooks.quantize(4, rounding="stochastic")], ids=repr)
def test_no_hook_synchronizes_with_the_device(nccl: Group, hook: CommHook) -> None:
    hook, driver = capture(hook, enabled=False), Driver(nccl)
    spec = BucketSpec(0, ("a", "b"), ((300, 300), (300,)), ((300, 1), (1,)), torch.float32, torch.device("cuda", 0))
    grad, state = torch.randn(spec.numel, device="cuda"), hook.init(spec)
    for step in range(4):
        torch.cuda.set_sync_debug_mode("error" if step > 1 else "default")
        try:
            driver.launch(hook, grad, state, Turn(spec, 0, 1, step, donated=True)).wait()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    driver.close()


def test_a_hook_that_reads_is_refused_by_name_and_others_are_not(nccl: Group) -> None:
    captured, eager, other = (_model(nccl, hook) for hook in (capture(Own("read")), Own(), HOOKS["8 bits"]))
    with pytest.warns(UserWarning, match=r"capturing capture\(Own\(.*as CUDA graphs failed"):
        found = [grad for step in range(5) for grad in _step(captured, step)]
    wanted = [grad for step in range(5) for grad in _step(eager, step)]
    assert all(map(torch.equal, found, wanted))
    for step in range(6):  # the allocator has left the failed capture
        _step(other, step)
    assert _graphs(other) >= 2


def test_what_was_not_sent_in_one_pass() -> None:
    for numel, dtype in itertools.product((0, 1, 31, 4096, 100_003), (torch.float32, torch.bfloat16)):
        wanted, sent = torch.randn(numel, device="cuda"), torch.randn(numel, device="cuda").to(dtype)
        wanted[::7], sent[::11], sent[1::13] = float("inf"), float("nan"), float("-inf")
        expected = drop_nonfinite_(wanted - sent)
        feedback._keep_unsent(wanted, sent)
        assert torch.equal(wanted, expected)

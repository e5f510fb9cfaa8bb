"""Captured reductions on a GPU: bit for bit what the same hook computes eagerly. See also tests/unit/reducer/test_captured.py."""

import gc
import itertools
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.collectives import all_reduce
from gradwire.groups import Group
from gradwire.hooks import BucketSpec, CommHook, Turn, capture
from gradwire.hooks.combinators import feedback
from gradwire.hooks.numerics.elementwise import drop_nonfinite_
from gradwire.parallel import DistributedDataParallel
from gradwire.policies import NonFinite
from gradwire.reducer.hook.cuda_graphs import CapturedReductions
from gradwire.reducer.hook.driver import Driver
from tests.unit.reducer.test_captured import HOOKS as ON_CPU, Own

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CapturedReductions, "enabled", True)


HOOKS = ON_CPU | {
    "top_k": hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.01)),
    "dgc": hooks.dgc(0.01, clip=1.0, warmup_steps=3),
}


def _model(group: Group, hook: CommHook, dtype: torch.dtype = torch.float32, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(128, 128) for _ in range(6)]
    ddp = DistributedDataParallel(
        torch.nn.Sequential(*layers).to("cuda", dtype), process_group=group, bucket_cap_mb=0.15, **options
    )
    ddp.set_hook(hook)
    return ddp


def _step(ddp: DistributedDataParallel, step: int, factor: float = 1.0) -> list[Tensor]:
    ddp.zero_grad()
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step)).to(next(ddp.parameters()))
    (ddp(x).square().mean() * factor).backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def _graphs(ddp: DistributedDataParallel) -> int:
    return len(_segments(ddp))


def _segments(ddp: DistributedDataParallel) -> list[Any]:
    buckets = ddp.replica.runner.driver.captured._buckets
    return [bucket.segments for bucket in buckets.values() if bucket.segments]


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


@pytest.mark.parametrize("name", ["8 bits", "power_sgd", "stochastic", "by name"])
def test_a_step_that_is_dropped_leaves_the_graphs_valid(nccl: Group, name: str) -> None:
    captured, eager = (
        _model(nccl, hook, nonfinite=NonFinite.SKIP) for hook in (HOOKS[name], capture(HOOKS[name], enabled=False))
    )
    for step in range(14):
        graphs = _segments(captured)
        found, wanted = (_step(ddp, step, float("nan") if step in (8, 11) else 1.0) for ddp in (captured, eager))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
        assert step < 8 or (graphs and _segments(captured) == graphs), step


@pytest.mark.parametrize("name", ["8 bits", "power_sgd", "top_k", "sign"])
def test_graphs_add_little_to_the_peak_of_memory(nccl: Group, name: str) -> None:
    """All that is reserved for graphs counts, as a replay uses it without allocating."""

    def peak(hook: CommHook) -> int:
        layers = (torch.nn.Linear(2048, 2048) for _ in range(24))
        ddp = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), process_group=nccl)
        ddp.set_hook(hook)
        for _ in range(8):
            torch.cuda.reset_peak_memory_stats()
            ddp.zero_grad()
            ddp(torch.ones(8, 2048, device="cuda")).sum().backward()
        assert bool(_graphs(ddp)) == (hook is HOOKS[name])
        private = [segment for segment in torch.cuda.memory_snapshot() if segment["segment_pool_id"] != (0, 0)]
        free = sum(segment["total_size"] - segment["allocated_size"] for segment in private)
        return torch.cuda.max_memory_allocated() + free

    graphs, gradients = peak(HOOKS[name]), 24 * 4 * (2048 * 2048 + 2048)
    gc.collect()
    more = graphs - peak(capture(HOOKS[name], enabled=False))
    print(f"{name}: graphs add {more / 2**20:.0f} MiB to the peak; gradients {gradients / 2**20:.0f} MiB")
    assert more <= gradients // 10


@pytest.mark.parametrize("hook", HOOKS.values(), ids=repr)
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
    torch.rand(4, device="cuda")  # the generator has left the failed capture
    for step in range(6):  # and the allocator
        _step(other, step)
    assert _graphs(other) >= 2


def test_graphs_do_not_use_memory_that_torch_frees(nccl: Group) -> None:
    """As torch.compile(mode="reduce-overhead") does anywhere in the process."""
    layers = [torch.nn.Linear(1024, 1024) for _ in range(4)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), process_group=nccl, bucket_cap_mb=12)
    ddp.set_hook(hooks.chain(hooks.error_feedback(), hooks.power_sgd(rank=8)))
    others: list[Tensor] = []
    for step in range(8):
        if step == 5:
            assert _graphs(ddp)
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            others = [
                torch.full((mib << 18,), 7, dtype=torch.int32, device="cuda")
                for mib in (32, 32, 32, 24, 16, 9, 8, 4, 2)
            ]
        ddp.zero_grad()
        ddp(torch.ones(64, 1024, device="cuda")).square().mean().backward()
        torch.cuda.synchronize()
        assert all(bool((other == 7).all()) for other in others), step


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_whole_step_in_a_graph_of_the_users(nccl: Group, mode: str) -> None:
    """The watchdog, which looks at operations meanwhile, neither spoils it nor ends."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        ddp, x = _model(nccl, HOOKS["8 bits"]), torch.randn(8, 128, device="cuda")
        for step in range(12):
            if step == 11:
                torch.cuda.synchronize()
                graph.capture_begin(capture_error_mode=mode)
                time.sleep(0.3)
            ddp.zero_grad(set_to_none=False)
            ddp(x).square().mean().backward()
        time.sleep(0.3)
        graph.capture_end()
        graph.replay()
        torch.cuda.synchronize()
    assert not nccl.ledger.pending
    assert any("gradwire-watchdog" in thread.name for thread in threading.enumerate())
    nccl.run(all_reduce(x))


def test_what_was_not_sent_in_one_pass() -> None:
    for numel, dtype in itertools.product((0, 1, 31, 4096, 100_003), (torch.float32, torch.bfloat16)):
        wanted, sent = torch.randn(numel, device="cuda"), torch.randn(numel, device="cuda").to(dtype)
        wanted[::7], sent[::11], sent[1::13] = float("inf"), float("nan"), float("-inf")
        expected = drop_nonfinite_(wanted - sent)
        feedback._keep_unsent(wanted, sent)
        assert torch.equal(wanted, expected)

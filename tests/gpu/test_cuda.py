"""What only a CUDA device can show. Skipped where there is none."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageError
from gradwire.groups import C10dGroup, Group
from gradwire.hooks import BucketSpec, CommHook, Reduced, Reduction, Turn, cast, chain, error_feedback, mean, quantize
from gradwire.interop import HookedGroup, from_process_group, register_backend
from gradwire.parallel import Balance, DistributedDataParallel
from gradwire.policies import Gradients
from gradwire.reducer.hook.driver import Driver
from gradwire.testing import check_group, run_ranks

pytestmark = pytest.mark.gpu


def test_threads_on_cuda_conform() -> None:
    check_group(lambda fn: run_ranks(fn, 2, kind="threads"), device="cuda")


def test_gloo_on_cuda_conforms() -> None:
    check_group(lambda fn: run_ranks(fn, 2, kind="gloo"), device="cuda")


def test_nccl_takes_and_lowers(nccl: Group) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        t = torch.ones(7, device="cuda").to(dtype)
        nccl.all_reduce(t)
        assert torch.equal(t.float() if not dtype.is_complex else t.real, torch.ones(7, device="cuda"))
    t = torch.full((4, 4), 3.0, device="cuda").t()
    assert nccl.all_reduce(t, ReduceOp.PREMUL_SUM, factor=0.5).get_future().wait()[0] is t
    assert torch.equal(t, torch.full((4, 4), 1.5, device="cuda"))
    out = torch.empty(4, device="cuda")
    work = nccl.all_gather_into_tensor(out, torch.arange(4.0, device="cuda"), async_op=True)
    seen = []
    nccl.on_completion(seen.append)
    assert work.wait()
    nccl.barrier()
    assert out.tolist() == [0, 1, 2, 3]


def test_completion_is_noticed_on_the_host(nccl: Group) -> None:
    seen = []
    nccl.on_completion(seen.append)
    for i in range(3):
        nccl.all_reduce(torch.ones(1000, device="cuda"), label=str(i), async_op=True)
    torch.cuda.synchronize()
    nccl.close()
    assert [info.label for info in seen] == ["0", "1", "2"]


@pytest.mark.parametrize("noticed", [False, True], ids=["waited for", "noticed"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM], ids=lambda op: op.name)
def test_gloo_follows_the_streams_of_its_callers(op: ReduceOp, noticed: bool) -> None:
    """Inputs are computed late on one stream, and results are read on another, whichever threads are involved."""
    from torch._C._distributed_c10d import HashStore

    store, count = HashStore(), 1 << 20
    factor = {"factor": 0.5} if op is ReduceOp.PREMUL_SUM else {}

    def rank_main(rank: int) -> list[Tensor]:
        came = []
        with C10dGroup.gloo(store, rank, 2, timeout=20) as group:
            for step in range(3):
                with torch.cuda.stream(torch.cuda.Stream()):
                    torch.cuda._sleep(50_000_000)
                    t = torch.full((count,), float(rank + 1 + step), device="cuda")
                    work = group.all_reduce(t, op, async_op=True, **factor)
                    if noticed:  # by another thread, before any wait
                        over = threading.Event()
                        work.add_done_callback(lambda _, over=over: over.set())
                        assert over.wait(20)
                work.wait()
                with torch.cuda.stream(torch.cuda.Stream()):
                    came.append(t.clone())
            torch.cuda.synchronize()
            group.barrier()
        return came

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(rank_main, range(2)))
    scale = 1.0 if op is ReduceOp.SUM else 0.5
    for came in ranks:
        for step, t in enumerate(came):
            assert torch.equal(t, torch.full((count,), (3.0 + 2 * step) * scale, device="cuda"))


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)).cuda()


@pytest.mark.parametrize("views", list(Gradients), ids=lambda v: v.value)
def test_ddp_over_nccl_equals_the_bare_model(nccl: Group, views: Gradients) -> None:
    bare, wrapped = _model(), _model()
    ddp = DistributedDataParallel(wrapped, process_group=nccl, gradient_as_bucket_view=views is Gradients.VIEWS)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (bare, wrapped)]
    for step in range(5):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
        for model, optimizer in zip((bare, ddp), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(bare.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_chain_of_hooks_on_a_side_stream(nccl: Group) -> None:
    model = _model()
    ddp = DistributedDataParallel(model, process_group=nccl)
    ddp.set_hook(chain(cast(torch.bfloat16), mean()))
    x = torch.randn(16, 64, device="cuda")
    ddp(x).sum().backward()
    bare = _model()
    bare(x).sum().backward()
    for a, b in zip(model.parameters(), bare.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.allclose(a.grad, b.grad.bfloat16().float())


class Twice(CommHook):
    """Two collectives, so that it runs on the lane where streams are not ordered."""

    collectives = 2

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        value = grad * 2
        yield all_reduce(value, op=ReduceOp.AVG)
        value = value / 4
        yield all_reduce(value)
        torch.cuda._sleep(50_000_000)
        return Reduced(value * 2, grad)


def _behind_and_before(group: Group) -> list[float]:
    driver = Driver(group)
    spec = BucketSpec(0, ("p",), ((1000,),), ((1,),), torch.float32, torch.device("cuda", 0))
    seen = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            grad = torch.zeros(1000, device="cuda")
            torch.cuda._sleep(200_000_000)
            grad += 1 + group.rank
            pending = driver.launch(Twice(), grad, None, Turn(spec, group.rank, group.size))
            seen += (pending.wait() + 0).unique().tolist()
    driver.close()
    return seen


def test_what_a_lane_does_comes_after_the_callers_work_and_before_its_next() -> None:
    """gloo takes CUDA tensors and orders no streams: the lane's thread must."""
    assert run_ranks(_behind_and_before, 2, kind="gloo") == [[3.0, 3.0]] * 2


def _refused(group: Group) -> str:
    with pytest.raises(UsageError) as caught:
        DistributedDataParallel(_model(), process_group=group)
    return str(caught.value)


def test_thread_ranks_cannot_share_a_device() -> None:
    """The engine has one thread per device: a rank that waits in it would block the others forever."""
    assert all("one thread per CUDA device" in text for text in run_ranks(_refused, 2, kind="threads"))


def test_a_hooked_group_follows_streams(nccl: Group) -> None:
    """A gradient on a side stream behind a long kernel, and an operation that passes: only a wait orders the current stream."""
    group = HookedGroup(nccl, chain(error_feedback(), quantize(bits=8)))
    assert group.orders_streams(torch.device("cuda"))
    side = torch.cuda.Stream()
    for _ in range(4):
        gradient, loss = torch.randn(1 << 20, device="cuda"), torch.zeros(1, device="cuda")
        expected = gradient * 2
        works: list[Any] = []

        def reduce(gradient: Tensor = gradient, loss: Tensor = loss, works: list[Any] = works) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(20_000_000)
                gradient.mul_(2)
                works.append(group.all_reduce(gradient, async_op=True))
                torch.cuda._sleep(20_000_000)
                loss.add_(3)
                works.append(group.all_reduce(loss, op=ReduceOp.MAX, async_op=True))

        x = torch.ones(1, device="cuda", requires_grad=True)
        x.register_hook(lambda grad, reduce=reduce: reduce())
        (x * 1).sum().backward()
        works[0].wait()
        works[1].wait()
        torch.testing.assert_close(gradient, expected, rtol=0, atol=0.1)
        assert not torch.equal(gradient, expected)
        assert loss.item() == 3
    assert group.hook_state_dict()["step"] == 4
    group.close()


def test_fsdp_over_nccl_reduces_by_the_hook_of_a_mesh_dimension() -> None:
    """A world of one: the hook rounds, and nothing else changes."""
    register_backend("hooked_nccl", kind="nccl", hook=chain(error_feedback(), quantize(bits=8)))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        done = {}
        for backend in ("nccl", "hooked_nccl"):
            names = ("dp_replicate", "dp_shard")
            mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=names, backend_override={"dp_replicate": backend})
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).cuda()
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            for step in range(10):
                inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).cuda()
                loss = (model(inputs) - inputs[:, :8].sin()).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            done[backend] = loss.item()
        group = from_process_group(mesh.get_group("dp_replicate"))
        assert isinstance(group, HookedGroup)
        assert group.hook_state_dict()["step"] == 10
        assert done["hooked_nccl"] != done["nccl"]
        assert done["hooked_nccl"] == pytest.approx(done["nccl"], rel=0.01)
    finally:
        dist.destroy_process_group()


class Sleeping(nn.Module):
    """A model whose forward keeps the device busy for each sample, and the host not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(2_000_000 * len(x))  # type: ignore[attr-defined]
        return self.layer(x)


def test_balance_measures_the_device_and_does_not_wait_for_it(nccl: Group) -> None:
    ddp = DistributedDataParallel(Sleeping().cuda(), process_group=nccl)
    balance, x = Balance(ddp, every=5), torch.ones(8, 4, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in range(16):
        if step == 5:
            begin.record()
            torch.cuda.set_sync_debug_mode("error")
        balance.batch_size(8)
        ddp(x).sum().backward()
    torch.cuda.set_sync_debug_mode("default")
    end.record()
    end.synchronize()
    for _ in range(5):  # until ranks agree again: then the device has finished those above
        balance.batch_size(8)
        ddp(x).sum().backward()
    [seconds] = balance.state_dict()["seconds"]
    assert seconds == pytest.approx(begin.elapsed_time(end) / 1e3 / 11 / 8, rel=0.25)

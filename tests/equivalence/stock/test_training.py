"""torch's own training tools, unchanged, over gradwire: the same parameters as over gloo."""

import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

STEPS = 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model: nn.Module, rank: int, steps: int = STEPS, optimizer: Any = None) -> torch.Tensor:
    """Train on this rank's own data; all parameters as one vector."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(16, 8, generator=data)
        nn.functional.mse_loss(model(inputs).float(), inputs[:, :4].sin()).backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([value.detach().flatten() for value in values])


class Forked(nn.Module):
    """Each rank uses only a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.even, self.odd = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.odd if dist.get_rank() % 2 else self.even)(self.shared(x))


def ddp(rank: int, size: int) -> torch.Tensor:
    return train(DistributedDataParallel(make_model()), rank)


def ddp_small_bucket_views(rank: int, size: int) -> torch.Tensor:
    return train(DistributedDataParallel(make_model(), bucket_cap_mb=0.001, gradient_as_bucket_view=True), rank)


def ddp_static_graph(rank: int, size: int) -> torch.Tensor:
    return train(DistributedDataParallel(make_model(), static_graph=True), rank)


def ddp_unused_parameters(rank: int, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    return train(DistributedDataParallel(Forked(), find_unused_parameters=True), rank)


def ddp_no_sync(rank: int, size: int) -> torch.Tensor:
    model = DistributedDataParallel(make_model())
    data = torch.Generator().manual_seed(rank)
    with model.no_sync():
        model(torch.randn(4, 8, generator=data)).sum().backward()
    model(torch.randn(4, 8, generator=data)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def ddp_join(rank: int, size: int) -> torch.Tensor:
    model = DistributedDataParallel(make_model())
    with model.join():
        train(model, rank, steps=3 + 2 * rank)
    return flat(model)


def ddp_buffers(rank: int, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))
    train(model, rank)
    model(torch.zeros(4, 8))
    return torch.cat([flat(model), *(b.float().flatten() for b in model.buffers())])


def ddp_sparse(rank: int, size: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.EmbeddingBag(10, 4, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([[1, 2 + rank], [step + 3 * rank, 4]])).pow(2).sum().backward()
        optimizer.step()
    return flat(model)


def ddp_compiled(rank: int, size: int) -> torch.Tensor:
    """Dynamo must not trace the group's methods, which C++ calls inside a compiled function."""
    return train(torch.compile(DistributedDataParallel(make_model()), backend="eager"), rank)


def ddp_hook(hook: Callable[..., Any], make_state: Callable[[], Any] = lambda: None) -> Callable[..., torch.Tensor]:
    def scenario(rank: int, size: int) -> torch.Tensor:
        model = DistributedDataParallel(make_model())
        model.register_comm_hook(make_state(), hook)
        return train(model, rank)

    scenario.__name__ = f"ddp_{hook.__name__}"
    return scenario


def power_sgd_state() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)


def zero(rank: int, size: int) -> torch.Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # deprecated TorchScript warns 67 times at its import

    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    result = train(model, rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=0)
    return result


def fsdp2(rank: int, size: int) -> torch.Tensor:
    model, mesh = make_model(), init_device_mesh("cpu", (size,))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return train(model, rank)


def fsdp2_mixed_precision(rank: int, size: int) -> torch.Tensor:
    model = make_model()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return train(model, rank)


def fsdp2_memory_of_the_group(rank: int, size: int) -> torch.Tensor:
    model = make_model()
    fully_shard(model)
    if hasattr(model, "set_allocate_memory_from_process_group_for_comm"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    return train(model, rank)


def hsdp(rank: int, size: int) -> torch.Tensor:
    model = make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")))
    return train(model, rank)


def fsdp1(rank: int, size: int) -> torch.Tensor:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    train(model, rank)
    with FullyShardedDataParallel.summon_full_params(model):
        return flat(model).clone()


def tensor_parallel(rank: int, size: int) -> torch.Tensor:
    model = make_model()
    parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train(model, 0, steps=3)


def dtensor(rank: int, size: int) -> torch.Tensor:
    t = distribute_tensor(torch.arange(24.0).reshape(4, 6), init_device_mesh("cpu", (size,)), [Shard(0)])
    parts = [t.redistribute(placements=[Shard(1)]).to_local(), t.redistribute(placements=[Replicate()]).to_local()]
    return torch.cat([*(part.flatten() for part in parts), t.sum().full_tensor().reshape(1)])


def checkpointing(rank: int, size: int) -> torch.Tensor:
    model, folder = make_model(), [tempfile.mkdtemp() if rank == 0 else ""]
    fully_shard(model)
    dist.broadcast_object_list(folder)
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    train(model, rank, steps=2)
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state["model"])
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    return flat(model)


TOOLS = [
    ddp, ddp_small_bucket_views, ddp_static_graph, ddp_unused_parameters, ddp_no_sync, ddp_join, ddp_buffers, ddp_sparse,
    ddp_hook(default_hooks.allreduce_hook), ddp_hook(default_hooks.fp16_compress_hook),
    ddp_hook(powerSGD_hook.powerSGD_hook, power_sgd_state), ddp_compiled, zero, fsdp2, fsdp2_mixed_precision,
    fsdp2_memory_of_the_group, hsdp, fsdp1, tensor_parallel, dtensor, checkpointing,
]  # fmt: skip


@pytest.fixture
def results(fresh: Callable[..., Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What every tool trained, on both ranks, over gloo and over gradwire."""

    def all_of_them(rank: int, size: int) -> dict[str, Any]:
        logging.getLogger("torch").setLevel(logging.ERROR)
        done: dict[str, Any] = {}
        for tool in TOOLS:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    done[tool.__name__] = tool(rank, size)
            except Exception as error:  # the ranks are no longer in step, so what follows is not tried
                done["failed"] = f"{tool.__name__}: {type(error).__name__}: {error}"
                break
        return done

    over_gloo, over_gradwire = fresh(all_of_them, ["gloo", "gradwire"])
    return over_gloo, over_gradwire


def test_same_parameters_as_over_gloo(results: tuple[list[dict[str, Any]], ...]) -> None:
    """One test, because every worker that has a part of it would train with all tools."""
    for over_gloo, over_gradwire in zip(*results, strict=True):
        for done in (over_gloo, over_gradwire):
            assert done.keys() == {tool.__name__ for tool in TOOLS}, done.get("failed")
        # Sums of float32 may be formed in another order.
        torch.testing.assert_close(over_gradwire, over_gloo, rtol=1e-5, atol=1e-6)
    trained = results[1][0]["ddp"]
    assert not torch.allclose(trained, flat(make_model()), atol=1e-2)
    assert torch.equal(trained, results[1][1]["ddp"])


def test_a_wrapper_under_stock_ddp_sees_its_traffic(stock: Callable[..., Any]) -> None:
    def scenario(rank: int, size: int) -> list[str]:
        gw.register_backend("recorded", wrap=gw.Recording)
        group = dist.new_group(backend="recorded")
        recording = gw.from_process_group(group)
        assert isinstance(recording, gw.Recording)
        model = DistributedDataParallel(make_model(), process_group=group)
        model(torch.ones(2, 8)).sum().backward()
        return [signature.kind.value for signature in recording.submitted]

    for kinds in stock(scenario):
        assert "all_reduce" in kinds


def test_a_missing_rank_ends_ddp_with_its_name(fresh: Callable[..., Any]) -> None:
    """C++ passes the error on as a RuntimeError; the message survives."""

    def scenario(rank: int, size: int) -> str:
        store = dist.group.WORLD.get_group_store()
        model = DistributedDataParallel(make_model())
        loss = model(torch.ones(2, 8)).sum()
        if rank == 1:
            store.wait(["told"], timedelta(seconds=100))
            return ""
        dist.group.WORLD.set_timeout(timedelta(seconds=0.8))
        try:
            loss.backward()
        except RuntimeError as error:
            said = str(error)
        store.set("told", "yes")
        return said

    said = fresh(scenario)[0][0]  # torch 2.11 keeps the reducer, and with it the group, after a backward that failed
    assert "CollectiveTimeout" in said
    assert "missing: ranks [1]" in said


def test_the_builtin_fp16_hook_is_out_of_reach(stock: Callable[..., Any]) -> None:
    """It needs a future that only C++ can make; docs/interop.md has the alternative."""

    def scenario(rank: int, size: int) -> bool:
        model = DistributedDataParallel(make_model())
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        with pytest.raises(RuntimeError, match="should return TensorList"):
            model(torch.ones(2, 8)).sum().backward()
        return True

    assert all(stock(scenario))

"""A hook as the process group of a mesh dimension: FSDP2's hybrid sharding and `replicate()`, and torch's own DDP."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire.collectives import OpKind
from gradwire.hooks import CommHook, chain, error_feedback, mean, quantize

Q8 = chain(error_feedback(), quantize(bits=8))


class Block(nn.Module):
    def __init__(self, *, recompute: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 16))
        self.recompute = recompute  # whether the checkpoint is re-entrant; None for no checkpoint

    def forward(self, x: Tensor) -> Any:
        return x + (
            self.layers(x) if self.recompute is None else checkpoint(self.layers, x, use_reentrant=self.recompute)
        )


def build(recompute: bool | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), Block(recompute=recompute), Block(recompute=recompute), nn.Linear(16, 2))


def backend_of(hook: CommHook | None, kind: str = "gloo") -> str:
    """The name of a backend that records what is sent, with the hook above it."""
    if hook is None:
        return "gloo"
    name = "hooked"
    gw.register_backend(name, kind=kind, wrap=lambda group: gw.HookedGroup(gw.Recording(group), hook))
    return name


def mesh_of(shape: tuple[int, int], backend: str) -> Any:
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={"dp_replicate": backend})


def sharded(model: nn.Module, mesh: Any, **how: Any) -> nn.Module:
    for block in model.children():
        fully_shard(block, mesh=mesh, **how)
    fully_shard(model, mesh=mesh, **how)
    return model


def train(model: nn.Module, process_group: Any, rank: int, *, steps: int = 4, parts: int = 1) -> Tensor:
    """The losses, averaged over the group, and the norms of gradients: neither is a gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    figures = []
    for step in range(steps):
        inputs = torch.randn(parts, 4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
        for i, part in enumerate(inputs):
            last = i == parts - 1
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            loss = (model(part) - part[:, :2].sin()).square().mean()
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss, op=dist.ReduceOp.AVG, group=process_group)
        figures += [mean_loss, norm.full_tensor() if hasattr(norm, "full_tensor") else norm]
    return torch.stack([f.float() for f in figures])


FORMS: dict[str, Callable[[Any, int], tuple[nn.Module, dict[str, Any]]]] = {
    "hybrid sharding": lambda mesh, size: (sharded(build(), mesh), {}),
    "re-entrant checkpoints": lambda mesh, size: (sharded(build(True), mesh), {}),
    "checkpoints": lambda mesh, size: (sharded(build(False), mesh), {}),
    "accumulation without sync": lambda mesh, size: (sharded(build(), mesh), {"parts": 3}),
    "reduced in bfloat16": lambda mesh, size: (
        sharded(build(), mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)),
        {},
    ),
    "reduced in float16, divided before and after": lambda mesh, size: (
        sharded(build(), mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16)),
        {},
    ),
    "a divisor of its own": lambda mesh, size: (divided(sharded(build(), mesh), 3.0), {}),
    "sums forced": lambda mesh, size: (summed(sharded(build(), mesh)), {}),
}


def divided(model: Any, factor: float) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(factor)
    return model


def summed(model: Any) -> nn.Module:
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    return model


def forms(rank: int, size: int) -> dict[str, dict[str, Tensor]]:
    done: dict[str, dict[str, Tensor]] = {name: {} for name in FORMS}
    mesh: Any = None
    for hook_name, hook in {"stock": None, "mean": mean(), "q8": Q8}.items():
        for name, form in FORMS.items():
            if ((hook_name == "mean" and name != "a divisor of its own") or size == 4) and name != "hybrid sharding":
                continue
            if hook is not None or mesh is None:  # the states of hooks are in their groups
                mesh = mesh_of((2, size // 2), backend_of(hook))
            model, how = form(mesh, size)
            pg = mesh.get_group("dp_replicate")
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="HookedGroup")
                done[name][hook_name] = train(model, pg, rank, **how)
            if hook is Q8:
                group: Any = gw.from_process_group(pg)
                kinds = {s.kind for s in group.inner.submitted if s.label.startswith("bucket")}
                assert kinds == {OpKind.ALL_TO_ALL_SINGLE, OpKind.ALL_GATHER_INTO_TENSOR}
                assert group.hook_state_dict()["step"] == 4
                assert len(group.hook_state_dict()["state"]) == 4
    return done


@pytest.mark.parametrize("size", [2, 4])
def test_fsdp_reduces_its_gradients_by_the_hook_of_a_mesh_dimension(fresh: Callable[..., Any], size: int) -> None:
    (ranks,) = fresh(forms, ("gloo",), size)
    for done in ranks:
        for name, figures in ((name, figures) for name, figures in done.items() if figures):
            for exact in figures.keys() & {"mean"}:
                assert torch.equal(figures[exact], figures["stock"]), name
            assert not torch.equal(figures["q8"], figures["stock"]), name
            torch.testing.assert_close(
                figures["q8"], figures["stock"], rtol=0.03, atol=0.01, msg=lambda m, n=name: f"{n}: {m}"
            )


def in_other_forms(rank: int, size: int, kind: str) -> dict[str, Tensor]:
    done = {}
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    for name, hook in {"stock": None, "mean": mean(), "q8": Q8}.items():
        pg = dist.new_group(backend=backend_of(hook, kind))
        model: nn.Module = DistributedDataParallel(build(), process_group=pg, bucket_cap_mb=0.002)
        done[f"ddp, {name}"] = train(model, pg, rank)
        mesh = mesh_of((size, 1), backend_of(hook, kind))["dp_replicate"]
        model = build()
        for block in model.children():
            replicate(block, mesh=mesh)
        done[f"replicate, {name}"] = train(replicate(model, mesh=mesh), mesh.get_group(), rank)
        shards = init_device_mesh(
            "cpu", (size,), mesh_dim_names=("fsdp",), backend_override={"fsdp": backend_of(hook, kind)}
        )
        done[f"fsdp, {name}"] = train(sharded(build(), shards), shards.get_group(), rank)
        if hook is Q8:
            group: Any = gw.from_process_group(shards.get_group())
            gradients = [s.kind for s in group.inner.submitted if s.label.startswith("bucket")]
            assert gradients == [OpKind.ALL_TO_ALL_SINGLE] * 4 * 4
    return done


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_stock_ddp_replicate_and_shards_do_too(fresh: Callable[..., Any], kind: str) -> None:
    (ranks,) = fresh(partial(in_other_forms, kind=kind), ("gloo",))
    for done in ranks:
        for form in ("ddp", "replicate", "fsdp"):
            plain, ours, q8 = (done[f"{form}, {name}"] for name in ("stock", "mean", "q8"))
            assert torch.equal(ours, plain)
            assert not torch.equal(q8, plain)
            torch.testing.assert_close(q8, plain, rtol=0.03, atol=0.01)


def continued(rank: int, size: int, path: Path) -> tuple[Tensor, Tensor]:
    """Six steps at once, and three, a checkpoint, and three more."""

    def begin() -> tuple[nn.Module, Any, gw.HookedGroup]:
        mesh = mesh_of((size, 1), backend_of(Q8))
        model = sharded(build(), mesh)
        pg = mesh.get_group("dp_replicate")
        group = gw.from_process_group(pg)
        assert isinstance(group, gw.HookedGroup)
        return model, pg, group

    model, pg, group = begin()
    train(model, pg, rank, steps=3)
    dcp.save({"model": model.state_dict(), "hook": group}, checkpoint_id=str(path))
    whole = train(model, pg, rank, steps=3)
    model, pg, group = begin()
    loaded = {"model": model.state_dict(), "hook": group}
    dcp.load(loaded, checkpoint_id=str(path))
    model.load_state_dict(loaded["model"])  # type: ignore[arg-type]
    return whole, train(model, pg, rank, steps=3)


def test_state_is_restored_by_torchs_checkpoints(fresh: Callable[..., Any], tmp_path: Path) -> None:
    (ranks,) = fresh(partial(continued, path=tmp_path), ("gloo",))
    for whole, restored in ranks:
        assert torch.equal(whole, restored)

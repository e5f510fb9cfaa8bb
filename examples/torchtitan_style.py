"""A TorchTitan-style loop: the model is parallelized by a function of its own, here with gradwire's `replicate` over a device mesh.

gradwire run -n 2 examples/torchtitan_style.py --directory checkpoint
gradwire run -n 2 examples/torchtitan_style.py --directory checkpoint --resume
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gradwire as gw
from gradwire import Replica, hooks


@dataclass(frozen=True, slots=True)
class JobConfig:
    """What the command line says."""

    directory: str
    resume: bool
    hook: str
    steps: int


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """What to train, and how it is made parallel: TorchTitan registers one for each model."""

    build_model_fn: Callable[[], nn.Module]
    parallelize_fn: Callable[[nn.Module, DeviceMesh, JobConfig], Replica]
    build_optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer]


HOOKS = {
    "mean": hooks.mean(),
    "8 bits": hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8)),
}


def build_model() -> nn.Module:
    """Two linear layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))


def parallelize(model: nn.Module, mesh: DeviceMesh, job: JobConfig) -> Replica:
    """Average gradients over the mesh. No wrapper: the model and its parameter names stay as they are."""
    group = gw.from_process_group(mesh.get_group())
    return gw.replicate(model, group=group, hook=HOOKS[job.hook])


SPEC = TrainSpec(
    build_model_fn=build_model,
    parallelize_fn=parallelize,
    build_optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
)


def save(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica) -> None:
    """torch's distributed checkpoint, and the hook's state of each rank."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    torch.save(replica.hook_state_dict(), f"{directory}/hook-{dist.get_rank()}.pt")


def load(directory: str, model: nn.Module, optimizer: torch.optim.Optimizer, replica: Replica) -> None:
    """What `save` has written."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    replica.load_hook_state_dict(torch.load(f"{directory}/hook-{dist.get_rank()}.pt", weights_only=True))


def train(spec: TrainSpec, job: JobConfig) -> list[float]:
    """The loop."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_replicate",))
    model = spec.build_model_fn()
    replica = spec.parallelize_fn(model, mesh["dp_replicate"], job)
    optimizer = spec.build_optimizer_fn(model)
    first = 0
    if job.resume:
        load(job.directory, model, optimizer, replica)
        first = job.steps
    losses = []
    for step in range(first, first + job.steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    save(job.directory, model, optimizer, replica)
    replica.detach()
    return losses


def main() -> None:
    """Train, or continue, and print the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where the checkpoint is")
    parser.add_argument("--resume", action="store_true", help="continue from it")
    parser.add_argument("--hook", choices=HOOKS, default="8 bits")
    parser.add_argument("--steps", type=int, default=20)
    job = JobConfig(**vars(parser.parse_args()))
    os.makedirs(job.directory, exist_ok=True)
    dist.init_process_group("gloo")
    losses = train(SPEC, job)
    if dist.get_rank() == 0:
        print(f"loss {losses[-1]:.4f} with {HOOKS[job.hook]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

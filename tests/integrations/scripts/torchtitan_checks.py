"""On each rank: the loop of examples/torchtitan_style.py, and the same steps with torch's DDP."""

import json
import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

example, directory = runpy.run_path(sys.argv[1], run_name="example"), sys.argv[2]
said: dict[str, Any] = {}


def train(name: str, hook: str, *, steps: int = 3, resume: bool = False) -> list[float]:
    """The losses of the example's loop."""
    path = f"{directory}/{name}"
    os.makedirs(path, exist_ok=True)
    job = example["JobConfig"](directory=path, resume=resume, hook=hook, steps=steps)
    losses: list[float] = example["train"](example["SPEC"], job)
    dist.barrier()
    return losses


def stock(steps: int = 6) -> list[float]:
    """The same with torch's DDP."""
    model = nn.parallel.DistributedDataParallel(example["build_model"]())
    optimizer = example["SPEC"].build_optimizer_fn(model)
    losses = []
    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).tanh())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


dist.init_process_group("gloo")
said["stock"] = stock()
said["mean"] = train("mean", "mean", steps=6)
said["compressed"] = train("whole", "8 bits", steps=6)
said["resumed"] = train("half", "8 bits") + train("half", "8 bits", resume=True)
if dist.get_rank() == 0:
    for rank in range(dist.get_world_size()):
        path = f"{directory}/half/hook-{rank}.pt"
        said["step"] = torch.load(path, weights_only=True)["step"]
print(json.dumps(said))
dist.destroy_process_group()

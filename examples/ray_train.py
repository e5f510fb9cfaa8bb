"""Ray Train with gradwire: workers over a gradwire group, 1% of the gradients per step, and checkpoints with the hook's state.

python examples/ray_train.py --directory runs
python examples/ray_train.py --directory runs --resume
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch import nn

from gradwire import hooks
from gradwire.integrations import load_hook_states, save_hook_states
from gradwire.integrations.ray import GradwireConfig, prepare_model


def worker(config: dict[str, Any]) -> None:
    """Train on this rank's data, and save."""
    torch.manual_seed(0)
    hook = hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.01))
    model = prepare_model(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)), hook=hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if config["checkpoint"]:
        saved = torch.load(Path(config["checkpoint"]) / "model.pt", weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        load_hook_states([model], config["checkpoint"])
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    y = x.sum(1, keepdim=True).tanh()
    for _ in range(50):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
    with tempfile.TemporaryDirectory() as directory:  # one for each worker; Ray puts their files into one
        save_hook_states([model], directory)
        if dist.get_rank() == 0:
            torch.save(
                {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, f"{directory}/model.pt"
            )
        ray.train.report({"loss": loss.item()}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def last_checkpoint(directory: str) -> str:
    """The newest one of all runs."""
    saved = sorted(Path(directory).glob("*/checkpoint_*/model.pt"), key=os.path.getmtime)
    if not saved:
        raise SystemExit(f"there is no checkpoint in {directory}: omit --resume")
    return str(saved[-1].parent)


def main() -> None:
    """Start Ray on this machine, and train on two workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where runs are")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint there")
    args = parser.parse_args()
    directory = os.path.abspath(args.directory)
    checkpoint = last_checkpoint(directory) if args.resume else ""

    ray.init(num_cpus=2, include_dashboard=False)
    trainer = TorchTrainer(
        worker,
        train_loop_config={"checkpoint": checkpoint},
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(storage_path=directory),
        torch_config=GradwireConfig(),
    )
    result = trainer.fit()
    print(f"loss {result.metrics['loss']:.4f}, checkpoint {result.checkpoint.path}")
    ray.shutdown()


if __name__ == "__main__":
    main()

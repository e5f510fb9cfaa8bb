"""Accelerate with gradwire: its DDP, gradients in 8 bits with error feedback, and a checkpoint that includes the hook's state.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_train.py --directory checkpoint
accelerate launch --multi_gpu --num_processes 2 examples/accelerate_train.py --directory checkpoint --resume

The name of the option notwithstanding, this starts two processes that train on CPUs.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire import hooks
from gradwire.integrations.accelerate import GradwireAccelerator, GradwireKwargs


def main() -> None:
    """Train for an epoch, or one more, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where the checkpoint is")
    parser.add_argument("--resume", action="store_true", help="continue from it")
    args = parser.parse_args()

    hook = hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8))
    accelerator = GradwireAccelerator(cpu=True, kwargs_handlers=[GradwireKwargs(hook=hook)])

    torch.manual_seed(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))
    if args.resume:
        accelerator.load_state(args.directory)

    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss, 'mean').item():.4f} with {model.replica.hook}")
    accelerator.save_state(args.directory)
    accelerator.end_training()


if __name__ == "__main__":
    main()

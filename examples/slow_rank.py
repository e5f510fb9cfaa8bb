"""A training in which the batches of rank 2 take longer than those of the other ranks:

    gradwire run -n 4 examples/slow_rank.py

What gradwire shows of it is explained in docs/observe.md.
"""

from __future__ import annotations

import argparse
import time

import torch

import gradwire as gw


def load(seconds: float) -> torch.Tensor:
    time.sleep(seconds)  # a disk, a server, a tokenizer
    return torch.ones(256, 256)


def train(steps: int, data: float, slow: float) -> None:
    group = gw.init()
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(256, 256), torch.nn.ReLU())]
    model = gw.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2)  # a bucket for each layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        batch = load(slow if group.rank == 2 else data)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        gw.observe.samples(len(batch))  # for samples per second in the live view
    if group.rank == 0:
        print(f"{steps} steps on {group.size} ranks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", type=float, default=0.06, help="seconds that a batch takes")
    parser.add_argument("--slow", type=float, default=0.12, help="seconds that a batch of rank 2 takes")
    args = parser.parse_args()
    train(args.steps, args.data, args.slow)

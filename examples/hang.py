"""A training in which rank 1 keeps the others waiting from step 4 on, in a way of your choice:

    gradwire run -n 3 examples/hang.py loop

What `gradwire run` then reports is explained in docs/debugging-a-hang.md.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import threading

import torch
from torch.utils.data import DataLoader, Dataset

import gradwire as gw

FAULTS = ("loop", "c-code", "stopped", "killed", "loader", "order", "shape")


class Examples(Dataset):
    def __init__(self, broken: bool) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.broken and index == 8:
            download(index)
        return torch.ones(64)


def download(index: int) -> None:
    threading.Event().wait()  # for a server that does not answer


def search() -> None:
    while True:
        pass


def parse(text: str) -> None:
    re.match(r"(a+)+$", text)  # exponential time, in C, with the interpreter's lock


def misbehave(fault: str) -> None:
    if fault == "loop":
        search()
    elif fault == "c-code":
        parse("a" * 60 + "b")
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def train(fault: str, kind: str) -> None:
    group = gw.init(kind)
    broken = group.rank == 1
    model = gw.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, batch in enumerate(DataLoader(Examples(broken and fault == "loader"), batch_size=2)):
        now = broken and step == 4
        if now:
            misbehave(fault)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if now and fault == "order":
            continue  # the others average the loss
        group.all_reduce(loss.detach().expand(3 if now and fault == "shape" else 2).clone(), label="loss")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--kind", default="auto")
    args = parser.parse_args()
    train(args.fault, args.kind)

"""The training script of `detection.hangs`, in which one rank misbehaves. It is copied to a directory of its own and run there."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import gradwire as gw
from gradwire.hooks.base import CommHook, Reduction, Turn
from gradwire.hooks.dense import mean

FAULT_STEP = 4
WIDTH = 64
HIDDEN = "hidden"


def python_loop() -> None:
    """Spin in Python."""
    while True:
        time.sleep(0)


def c_loop() -> None:
    """Spin in C with the interpreter's lock: for this pattern `re` takes exponential time."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def stop_here() -> None:
    """As by a debugger, or Ctrl-Z."""
    os.kill(os.getpid(), signal.SIGSTOP)


def be_killed() -> None:
    """As by the kernel, out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def block() -> None:
    """Wait for something that never comes."""
    reader, writer = os.pipe()
    os.read(reader, 1)
    os.close(writer)


class Examples(Dataset[Tensor]):
    """Random examples; one of them never arrives, if `blocks` is not None."""

    def __init__(self, blocks: int | None) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        if index == self._blocks:
            block()
        return torch.ones(WIDTH)


class NeverEnds(CommHook):
    """The plain mean, except that one bucket is never sent."""

    def __init__(self, step: int | None) -> None:
        self._step = step
        self._mean = mean()

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """As `mean`."""
        if turn.step == self._step and turn.spec.index == 1:
            block()
        return (yield from self._mean.reduce(grad, state, turn))


def main(kind: str, fault: str, victim: int, steps: int) -> None:
    """Train; rank `victim` has the fault."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = gw.init(kind, timeout=120)
    mine = group.rank == victim
    model = nn.Sequential()
    for name in ("first", HIDDEN, "last"):
        model.add_module(name, nn.Linear(WIDTH, WIDTH))
    ddp = gw.DistributedDataParallel(model, bucket_cap_mb=0.015)
    if fault == "hook":
        ddp.set_hook(NeverEnds(FAULT_STEP if mine else None))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    batch = 2
    loader = iter(DataLoader(Examples(FAULT_STEP * batch if mine and fault == "loader" else None), batch_size=batch))
    step = 0

    def in_backward(*_: object) -> None:
        if mine and step == FAULT_STEP:
            {"python": python_loop, "c": c_loop}.get(fault, int)()

    model.get_parameter(f"{HIDDEN}.weight").register_hook(in_backward)  # its bias has a gradient by then
    for step in range(steps):
        now = mine and step == FAULT_STEP
        inputs = next(loader)
        if now:
            {"stopped": stop_here, "killed": be_killed}.get(fault, int)()
        if fault == "slow":
            time.sleep(0.13 if mine else 0.1)
        loss = ddp(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (now and fault == "missing"):
            value = loss.detach().expand(3 if now and fault == "shape" else 2).clone()
            group.all_reduce(value, label="loss")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

"""A rank of `python -m benchmarks faults --peer …`: trains until it is ended, and writes a line for every step that it has tried.

Every way of training has the same model, weights, samples of a step and optimizer. The one with torchft imports nothing of
gradwire: it may run in another environment.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GLOBAL_BATCH = 64
_SAMPLES = 256
_PLACE = int(os.environ.get("RANK", "0"))


class Job:
    """What all ways of training have in common."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder, self.options = folder, options
        self.part = GLOBAL_BATCH // options["ranks"]
        """Samples of a rank in a step, where they are not dealt."""
        _append(folder / "started", [time.monotonic(), _PLACE, os.getpid()])
        self._file = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        width = options["width"]
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 512), nn.Linear(512, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(_SAMPLES, 64)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def backward(self, model: nn.Module, step: int) -> None:
        """Forward and backward of this rank's part of a step."""
        begin = (step * GLOBAL_BATCH + _PLACE * self.part) % _SAMPLES
        self.loss(model, self.inputs[begin : begin + self.part], self.targets[begin : begin + self.part]).backward()

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(model(x), y)

    def tried(self, step: int, *, committed: bool, members: int, samples: int = GLOBAL_BATCH) -> None:
        """Write a line: a step was committed, or has to be computed again."""
        sums = [int(p.detach().view(torch.int32).sum()) for p in self.model.parameters()] if committed else []
        facts = [time.monotonic(), os.getpid(), step, int(committed), members, samples, f"{hash(tuple(sums)):x}"]
        os.write(self._file, json.dumps(facts).encode() + b"\n")


def elastic(job: Job) -> None:
    """`gw.elastic`."""
    import gradwire as gw

    def batch(samples: list[int]) -> tuple[Tensor, Tensor]:
        return job.inputs[samples], job.targets[samples]

    data = gw.Deal(range(_SAMPLES), global_batch=GLOBAL_BATCH, slots=job.options["slots"], collate_fn=batch)
    run = gw.elastic(job.model, job.optimizer, data=data)
    for step in run:
        for x, y in step:
            job.loss(job.model, x, y).backward()
        number, members = run.committed, len(run.view.members)
        committed = step.commit()
        job.tried(number, committed=committed, members=members)


def ddp(job: Job) -> None:
    """gradwire's DistributedDataParallel, from the last checkpoint if there is one."""
    import gradwire as gw

    group = gw.init()
    _plain(job, gw.DistributedDataParallel(job.model, process_group=group), group.size)


def torch_ddp(job: Job) -> None:
    """torch's DistributedDataParallel over gloo."""
    torch.distributed.init_process_group("gloo")
    _plain(job, nn.parallel.DistributedDataParallel(job.model), torch.distributed.get_world_size())


def _plain(job: Job, model: nn.Module, size: int) -> None:
    file, step, every = job.folder / "checkpoint.pt", 0, job.options["checkpoint"]
    if file.exists():
        saved = torch.load(file)
        job.model.load_state_dict(saved["model"])
        job.optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    last = time.monotonic()
    while True:
        job.optimizer.zero_grad()
        job.backward(model, step)
        job.optimizer.step()
        job.tried(step, committed=True, members=size)
        step += 1
        if every and _PLACE == 0 and time.monotonic() - last >= every:
            state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict(), "step": step}
            torch.save(state, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            last = time.monotonic()


def torchft(job: Job) -> None:
    """A replica of torchft with its DistributedDataParallel over gloo, with the timeouts of its example train_ddp.py."""
    ft: Any = importlib.import_module("torchft")
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    optimizer: Any = None

    def state_dict() -> dict[str, Any]:
        return {"model": job.model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        job.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        replica_id=f"replica_{_PLACE}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=job.options["lighthouse"],
        hostname="127.0.0.1",
    )
    model, optimizer = ft.DistributedDataParallel(manager, job.model), ft.Optimizer(manager, job.optimizer)
    while True:
        optimizer.zero_grad()
        job.backward(model, manager.current_step())
        step, members = manager.current_step(), manager.num_participants()
        optimizer.step()
        committed = manager.current_step() > step
        job.tried(step, committed=committed, members=members, samples=members * job.part)


def _append(path: Path, facts: list[Any]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, json.dumps(facts).encode() + b"\n")
    os.close(file)


WAYS = {"elastic": elastic, "ddp": ddp, "torch-ddp": torch_ddp, "torchft": torchft}

if __name__ == "__main__":
    WAYS[sys.argv[1]](Job(Path(sys.argv[2]), json.loads(sys.argv[3])))

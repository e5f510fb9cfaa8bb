"""A rank of `python -m benchmarks faults`: trains until it is told to leave, and writes a line for every step that it commits."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire import hooks
from gradwire.testing.faults import Chaos, inject

SAMPLES, BATCH = 256, 64


class Learner(nn.Module):
    """A small model, whose parameter `seen` has the number of times as its gradient that each sample is in the batch."""

    def __init__(self, width: int, *, exact: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 512), nn.Linear(512, 1))
        self.seen = nn.Parameter(torch.zeros(SAMPLES))
        for parameter in self.layers.parameters() if exact else ():  # on a grid, where sums are the same in any order
            parameter.register_hook(lambda grad: (grad.clamp(-8, 8) * 2**14).round() / 2**14)

    def forward(self, x: Tensor, y: Tensor, number: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y) + self.seen[number].sum()


def samples(counts: Tensor | None) -> str:
    """The samples that were counted once, as bits; nothing if one was counted twice or in part."""
    if counts is None or not torch.equal(counts, counts.clamp(0, 1).round()):
        return ""
    return f"{sum(1 << number for number in counts.nonzero().flatten().tolist()):x}"


def digest(model: nn.Module) -> str:
    """That of all parameters."""
    return hashlib.blake2b(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters()), digest_size=8
    ).hexdigest()


def write(file: int, facts: Sequence[Any]) -> None:
    """A line that is written whole, or not at all."""
    os.write(file, json.dumps(facts).encode() + b"\n")


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train."""
    torch.set_num_threads(1)
    file = os.open(folder / "commits", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    torch.manual_seed(0)
    model = Learner(options["width"], exact=options.get("exact", False))
    optimizer = torch.optim.AdamW(model.layers.parameters(), lr=1e-3)
    inputs = torch.randn(SAMPLES, 64)
    targets = inputs.sum(1, keepdim=True).sin()
    data = torch.utils.data.TensorDataset(inputs, targets, torch.arange(SAMPLES))
    deal = gw.Deal(data, global_batch=BATCH, slots=options["slots"])
    if options.get("plain"):
        return plain(folder, model, optimizer, deal, options["plain"])
    if options.get("rate"):
        chaos = Chaos(options["seed"], ["kill"], options["rate"], record=folder / "faults", least=options["least"])
        chaos.watch()
    counted, owing = "", options.get("owing", False)
    hook = None
    if owing:  # all gradients are counts of samples, a part of which is owed after each step
        model.layers.requires_grad_(False)
        hook = hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.03))

    def update() -> None:
        nonlocal counted
        counts = None if model.seen.grad is None else model.seen.grad * options["slots"]
        counted = str(counts.sum().item()) if owing and counts is not None else samples(counts)
        optimizer.step()

    last, pace, me = folder / "last", options.get("pace", 0.0), os.environ["GRADWIRE_MEMBER"]
    run = gw.elastic(model, optimizer, data=deal, hook=hook, update=update, check_every=1)
    with (folder / "members").open("a") as members:
        write(members.fileno(), [time.time(), me, os.getpid()])
    for step in run:
        began = time.monotonic()
        for batch in step:
            model(*batch).backward()
        if step.commit():
            write(
                file,
                [time.time(), me, step.number, run.view.epoch, digest(model), len(run.view.members), counted],
            )
        if last.exists():
            run.steps = int(last.read_text() or 0) or None
        if (hold := folder / f"hold {os.getpid()}").exists():
            hold.unlink()
            inject("gil", options["hold"], "")
        time.sleep(max(0.0, began + pace - time.monotonic()))
    state = run.training.replica.runner.state_dict()["state"]
    owed = sum(part.sum().item() for _, part in run.training.replica.hook.owed(state) or ())
    with (folder / "ends").open("a") as ends:
        write(ends.fileno(), [time.time(), me, run.left, owed])
    return None


def plain(folder: Path, model: Learner, optimizer: torch.optim.Optimizer, deal: gw.Deal, steps: int) -> None:
    """The same steps by `DistributedDataParallel`, for comparison. Rank 0 writes when each has ended."""
    gw.init()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ddp, times = gw.DistributedDataParallel(model), []
    slots = [slot for slot in range(deal.slots) if slot % size == rank]
    for step in range(steps):
        for slot in slots:
            ddp.require_backward_grad_sync = slot == slots[-1]
            ddp(*deal.batch(step, slot)).backward()
        optimizer.step()
        model.zero_grad()
        digest(model)
        times.append(time.time())
    if rank == 0:
        (folder / "plain").write_text(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

"""A rank of `python -m benchmarks faults`: trains until it is told to leave, and writes a line for every step that it commits."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradwire as gw
from gradwire.testing.faults import Chaos

SAMPLES = 256


def main(folder: Path, options: dict[str, Any]) -> None:
    """Train."""
    torch.set_num_threads(1)
    file = os.open(folder / "commits", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, options["width"]), nn.ReLU(), nn.Linear(options["width"], 512), nn.Linear(512, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(SAMPLES, 64)
    targets = inputs.sum(1, keepdim=True).sin()
    if options["rate"]:
        Chaos(options["seed"], ["kill"], options["rate"], record=folder / "faults", least=2).watch()
    data = gw.Deal(torch.utils.data.TensorDataset(inputs, targets), global_batch=64, slots=options["slots"])
    run = gw.elastic(model, optimizer, data=data, check_every=1)
    for step in run:
        for x, y in step:
            nn.functional.mse_loss(model(x), y).backward()
        if step.commit():
            bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
            digest = hashlib.blake2b(bits, digest_size=8).hexdigest()
            facts = [time.time(), os.environ["GRADWIRE_MEMBER"], run.committed - 1, run.view.epoch, digest]
            os.write(file, json.dumps([*facts, len(run.view.members)]).encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

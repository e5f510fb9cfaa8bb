"""An elastic run on several hosts: its programs, which a test starts on `gradwire.lab.hosts`, and what its ranks have committed."""

import hashlib
import json
import os
import sys
import time
import types
from pathlib import Path

import gradwire as gw

HUB = "import sys; from gradwire.cli import main; sys.exit(main(['hub', *sys.argv[1:]]))"
LAUNCH = "from helpers.elastic_hosts import launch; launch()"
_PACE = 0.02
"""Seconds of a step at least: a test has time to see what happens."""


def launch() -> None:
    """`gradwire run` with the arguments of this process. What its ranks are forked from is a fork of it."""
    import subprocess

    from gradwire.launch import preload
    from helpers import forked_python

    preload.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": forked_python.ForkedPython})  # type: ignore[attr-defined]
    forked_python.launch(popen=subprocess.Popen)


def train(folder: Path, width: int) -> None:
    """A rank: trains until a file `last` says with which step to end, and writes a line for each step that it commits."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())  # members have the parameters of the first one
    layers = [torch.nn.Linear(4, width), torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)]
    model = torch.nn.Sequential(*layers)
    points = torch.linspace(-1, 1, 64 * 4).view(64, 4)
    data = gw.Deal(torch.utils.data.TensorDataset(points, points.prod(1, keepdim=True)), global_batch=16, slots=8)
    optimizer = torch.optim.AdamW(model.parameters())
    run, last = gw.elastic(model, optimizer, data=data, check_every=10), folder / "last"
    with (folder / "commits").open("a", buffering=1) as file:
        for step in run:
            began = time.monotonic()
            for x, y in step:
                (model(x) - y).square().mean().backward()
            if step.commit():
                bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
                line = [time.monotonic(), os.environ["GRADWIRE_MEMBER"], run.committed, hashlib.sha1(bits).hexdigest(),
                        run.group.size, type(run.group).__name__]  # fmt: skip
                file.write(json.dumps(line) + "\n")
            if last.exists():
                run.steps = int(last.read_text())
            time.sleep(max(0.0, began + _PACE - time.monotonic()))


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]))

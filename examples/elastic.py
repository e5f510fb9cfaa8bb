"""Training that goes on when ranks die, leave and join. See docs/elastic.md.

gradwire run --nproc 4 --elastic 2:8 examples/elastic.py     # then: kill -9 PID, kill PID
python examples/elastic.py                                   # alone
An argument is the number of epochs, to have more time for that.
"""

import os
import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import gradwire as gw

points = torch.randn(4096, 2, generator=torch.Generator().manual_seed(0))  # the same on all ranks
data = gw.Deal(TensorDataset(points, (points.prod(1) > 0).long()), global_batch=128, slots=32)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
steps = data.steps(epochs=float(sys.argv[1]) if sys.argv[1:] else 5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)


def update() -> None:  # once per committed step, on every rank, with the averages in .grad
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    scheduler.step()


run = gw.elastic(model, optimizer, data=data, steps=steps, update=update, register={"scheduler": scheduler})
run.on_view(lambda view: print(f"process {os.getpid()} is rank {run.group.rank} of {len(view.members)}"))
for step in run:  # the same step again if ranks were lost in it
    losses = []
    for x, y in step:  # one batch for each of this rank's slots
        loss = cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
    if step.commit() and run.committed % 40 == 0 and run.group.rank == 0:
        print(f"step {run.committed}: loss {sum(losses) / len(losses):.3f}")

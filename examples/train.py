"""Data-parallel training in thirty lines. See docs/index.md.

gradwire run --nproc 2 examples/train.py
"""

import torch
from torch.nn.functional import cross_entropy

import gradwire as gw
from gradwire import hooks

group = gw.init()  # under gradwire run, torchrun, mpirun or srun; alone, a world of size 1
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
model = gw.DistributedDataParallel(model)
model.set_hook(hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8)))  # a quarter of the bytes
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(group.rank)  # every rank has its own batches
for step in range(1, 201):
    points = torch.randn(64, 2, generator=data)
    labels = (points.prod(1) > 0).long()
    optimizer.zero_grad()
    loss = cross_entropy(model(points), labels)
    loss.backward()  # in which gradients are averaged over all ranks
    optimizer.step()
    if group.rank == 0 and step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")

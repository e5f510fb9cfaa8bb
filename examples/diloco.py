"""DiLoCo: hosts on a slow link train by themselves and exchange their progress every 20 steps. See docs/hook-catalog.md.

torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/diloco.py     # on both hosts
gradwire run --nproc 2 examples/diloco.py                                                                    # on one machine
"""

import torch

import gradwire as gw
from gradwire import hooks

group = gw.init()
torch.manual_seed(0)
model = gw.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)))
model.set_hook(hooks.diloco(every=20, hook=hooks.chain(hooks.error_feedback(), hooks.quantize(bits=4))))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model.attach_optimizer(optimizer)  # outer steps follow the optimizer's
data = torch.Generator().manual_seed(group.rank)
for _ in range(200):
    x = torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    loss = (model(x) - x[:, :1] * x[:, 1:2]).pow(2).mean()
    loss.backward()  # nothing is sent
    optimizer.step()  # every 20th time, parameters are exchanged
model.average_parameters()  # now all ranks are equal
if group.rank == 0:
    print(f"loss {loss.item():.3f} after 200 steps and 10 exchanges")

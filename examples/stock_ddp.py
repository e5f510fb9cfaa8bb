"""torch's own DDP on a gradwire group: ranks of one host share memory. See docs/interop.md.

gradwire run --nproc 2 examples/stock_ddp.py
torchrun --standalone --nproc-per-node 2 examples/stock_ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire import hooks
from gradwire.interop import as_torch_hook

gw.register_backend(kind="shared_memory")  # "hierarchical" on several hosts
dist.init_process_group("gradwire")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
hook = as_torch_hook(
    hooks.chain(hooks.cast(torch.bfloat16), hooks.mean()), named_parameters=model.module.named_parameters()
)
model.register_comm_hook(None, hook)  # any of gradwire's hooks; without it, torch's own all-reduce
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(100):
    x = torch.randn(16, 8, generator=data)
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f} over {type(gw.from_process_group()).__name__}")
dist.destroy_process_group()

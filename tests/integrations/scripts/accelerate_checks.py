"""On each rank: the same training with Accelerate's own DDP, with gradwire's hooks on it, and with gradwire's DDP."""

import copy
import json
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import nn

from gradwire import hooks
from gradwire.errors import HookTypeError, UsageError
from gradwire.integrations.accelerate import GradwireAccelerator, GradwireKwargs, checkpoint_hook_states

example, directory = sys.argv[1:]
torch.manual_seed(1)
START = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
FEEDBACK = hooks.chain(hooks.error_feedback(), hooks.cast(torch.bfloat16), hooks.mean())
EIGHT_BITS = hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8))
said: dict[str, Any] = {}


def train(
    accelerator: Accelerator, *, save: str = "", load: str = "", forget: bool = False, accumulate: bool = False
) -> Any:
    """The losses of six steps; with `load`, of the last three."""
    model = copy.deepcopy(START)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    if load:
        hooks_of_loading = accelerator._load_model_state_pre_hook
        if forget:
            hooks_of_loading.clear()
        accelerator.load_state(f"{directory}/{load}")
    losses = []
    for step in range(3 if load else 0, 6):
        if step == 3 and save:
            accelerator.save_state(f"{directory}/{save}")
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        x = torch.randn(16, 8, generator=generator)
        if accumulate:
            with accelerator.no_sync(model):
                early = model(x[:8]).pow(2).mean()
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(early)
        loss = (model(x) - x[:, :4]).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    said.setdefault("wrapper", {})[save or load or f"{accelerator.ddp_handler} {type(accelerator).__name__}"] = type(
        model
    ).__module__
    return losses


def with_hook(hook: Any, cls: Any = Accelerator, **flags: Any) -> Accelerator:
    """An accelerator whose models have the hook, and whose checkpoints have its state."""
    accelerator = cls(cpu=True, kwargs_handlers=[GradwireKwargs(hook=hook, **flags)])
    if cls is Accelerator:
        checkpoint_hook_states(accelerator)
    return accelerator


said["world"] = Accelerator(cpu=True).num_processes
said["stock"] = train(Accelerator(cpu=True))
said["mean on stock"] = train(with_hook(hooks.mean()))
said["flags"] = train(with_hook(hooks.mean(), find_unused_parameters=True, gradient_as_bucket_view=True))
said["no hook"] = train(with_hook(None))
said["gradwire"] = train(GradwireAccelerator(cpu=True))
said["gradwire, mean"] = train(with_hook(hooks.mean(), GradwireAccelerator))
said["stock, accumulating"] = train(Accelerator(cpu=True), accumulate=True)
said["gradwire, accumulating"] = train(GradwireAccelerator(cpu=True), accumulate=True)

fp16 = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
said["fp16 on stock"] = train(Accelerator(cpu=True, kwargs_handlers=[fp16]))
said["fp16 on gradwire"] = train(GradwireAccelerator(cpu=True, kwargs_handlers=[fp16]))

for name, cls, hook in [("a", Accelerator, FEEDBACK), ("b", GradwireAccelerator, EIGHT_BITS)]:
    said[f"compressed {name}"] = train(with_hook(hook, cls), save=name)
    said[f"resumed {name}"] = train(with_hook(hook, cls), load=name)
    said[f"forgotten {name}"] = train(with_hook(hook, cls), load=name, forget=True)

for wrong in (
    lambda: GradwireKwargs(hook=hooks.error_feedback()),  # type: ignore[arg-type]
    lambda: GradwireKwargs(hook=hooks.mean(), comm_hook=DDPCommunicationHookType.FP16),
    lambda: checkpoint_hook_states(Accelerator(cpu=True)),
    lambda: with_hook(hooks.mean(), GradwireAccelerator).load_state(f"{directory}/no such directory"),
):
    try:
        wrong()
    except (HookTypeError, UsageError, ValueError) as error:
        said.setdefault("errors", []).append(f"{type(error).__name__}: {error}")
said["reprs"] = [
    repr(GradwireKwargs()),
    repr(GradwireKwargs(hook=hooks.mean(), find_unused_parameters=True, bucket_cap_mb=5)),
]
with open(f"{directory}/rank-{Accelerator(cpu=True).process_index}.json", "w") as file:
    json.dump(said, file)

GradwireAccelerator.end_training = lambda self: None  # which the example calls: the process group is needed again
for resume in ([], ["--resume"]):
    sys.argv = [example, "--directory", f"{directory}/example", *resume]
    runpy.run_path(example, run_name="__main__")
dist.destroy_process_group()

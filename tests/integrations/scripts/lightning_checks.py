"""On each rank: the same training with Lightning's DDPStrategy and with gradwire's."""

import json
import logging
import runpy
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ddp as lightning_ddp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

import gradwire as gw
from gradwire import hooks
from gradwire.errors import HookTypeError, UsageError
from gradwire.integrations.lightning import GradwireStrategy

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
example, directory = sys.argv[1:]
FEEDBACK = hooks.chain(hooks.error_feedback(), hooks.quantize(bits=4))
said: dict[str, Any] = {}


class Module(pl.LightningModule):
    """Keeps its losses."""

    def __init__(self, *, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        self.losses: list[float] = []
        self.automatic_optimization = not manual

    def training_step(self, batch: Any, index: int) -> Any:
        (x,) = batch
        loss = (self.layers(x) - x[:, :4]).pow(2).mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(
    strategy: Any, *, epochs: int = 2, save: str = "", load: str = "", manual: bool = False, accumulate: int = 1
) -> list[float]:
    """The losses of so many epochs, of three steps each, or those that are left."""
    module = Module(manual=manual)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
        default_root_dir=directory,
    )
    rank = trainer.strategy.cluster_environment.global_rank()
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(rank))
    path = f"{directory}/{load}.ckpt" if load else None
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=16), ckpt_path=path)
    if save:
        trainer.save_checkpoint(f"{directory}/{save}.ckpt")
    if isinstance(trainer.strategy, GradwireStrategy) and strategy.hook is not None:
        said.setdefault("hooks", []).append(repr(strategy.hook))
    return module.losses


said["stock"] = train(DDPStrategy())
said["gradwire"] = train(GradwireStrategy())
said["mean"] = train(GradwireStrategy(hook=hooks.mean(), find_unused_parameters=True))
said["stock, accumulating"] = train(DDPStrategy(), accumulate=2)
said["gradwire, accumulating"] = train(GradwireStrategy(), accumulate=2)
said["stock, manual"] = train(DDPStrategy(), manual=True)
said["gradwire, manual"] = train(GradwireStrategy(), manual=True)
said["fp16 on the CPU"] = train(GradwireStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook))

said["compressed"] = train(GradwireStrategy(hook=FEEDBACK))
said["first half"] = train(GradwireStrategy(hook=FEEDBACK), epochs=1, save="half")
said["second half"] = train(GradwireStrategy(hook=FEEDBACK), load="half")
saved = torch.load(f"{directory}/half.ckpt", weights_only=True)
said["states"] = [state["rank"] for state in saved.pop("gradwire_hook_states")]
dist.barrier()
if dist.get_rank() == 0:
    torch.save(saved, f"{directory}/forgotten.ckpt")
dist.barrier()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    said["forgotten"] = train(GradwireStrategy(hook=FEEDBACK), load="forgotten")
said["warning"] = [str(one.message) for one in caught if "starts without one" in str(one.message)]
said["outer steps"] = train(GradwireStrategy(hook=hooks.diloco(every=3)))

lines: list[str] = []
lightning_ddp.rank_zero_info = lines.append  # type: ignore[assignment]
for strategy in (DDPStrategy(), GradwireStrategy()):
    lines.clear()
    train(strategy)
    said.setdefault("advice", []).append(sum("static graph optimizations" in line for line in lines))

dist.destroy_process_group()  # the next one is another backend's
said["backend"] = train(GradwireStrategy(process_group_backend="gradwire"))
said["group"] = [dist.get_backend(), type(gw.from_process_group(dist.group.WORLD)).__name__]
for wrong in (
    lambda: GradwireStrategy(hook=hooks.error_feedback()),  # type: ignore[arg-type]
    lambda: GradwireStrategy(hook=hooks.mean(), ddp_comm_hook=default_hooks.fp16_compress_hook),
):
    try:
        wrong()
    except (HookTypeError, UsageError) as error:
        said.setdefault("errors", []).append(f"{type(error).__name__}: {error}")
for resume in ([], ["--resume"]):
    sys.argv = [example, "--directory", f"{directory}/example", *resume]
    runpy.run_path(example, run_name="__main__")
print(json.dumps(said))
dist.destroy_process_group()

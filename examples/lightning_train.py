"""PyTorch Lightning with gradwire: gradients by PowerSGD on the CPU, and checkpoints that include the hook's state.

python examples/lightning_train.py --directory checkpoints
python examples/lightning_train.py --directory checkpoints --resume
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradwire import hooks
from gradwire.integrations.lightning import GradwireStrategy

HOOK = hooks.chain(hooks.error_feedback(), hooks.power_sgd(rank=2))


class Regression(pl.LightningModule):
    """A small perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train for two epochs, or one more, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where checkpoints are")
    parser.add_argument("--resume", action="store_true", help="continue from the last one")
    args = parser.parse_args()

    pl.seed_everything(0)
    inputs = torch.randn(256, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=GradwireStrategy(hook=HOOK, process_group_backend="gradwire"),
        max_epochs=3 if args.resume else 2,
        callbacks=[pl.callbacks.ModelCheckpoint(args.directory, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(data, batch_size=16), ckpt_path="last" if args.resume else None)
    if trainer.is_global_zero:
        print(
            f"loss {trainer.callback_metrics['loss']:.4f} after step {trainer.global_step} with {trainer.strategy.hook}"
        )


if __name__ == "__main__":
    main()

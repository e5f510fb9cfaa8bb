"""Transformers' Trainer with gradwire: a tiny model without a download, gradients in 8 bits, and checkpoints with the hook's state.

torchrun --standalone --nproc-per-node 2 examples/trainer_train.py --directory checkpoints
torchrun --standalone --nproc-per-node 2 examples/trainer_train.py --directory checkpoints --resume
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from gradwire import hooks
from gradwire.integrations.transformers import GradwireTrainer


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) + index) % 32
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train for an epoch, or one more, and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where checkpoints are")
    parser.add_argument("--resume", action="store_true", help="continue from the last one")
    args = parser.parse_args()

    trainer = GradwireTrainer(
        model=GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=32, n_layer=1, n_head=2)),
        args=TrainingArguments(
            args.directory,
            num_train_epochs=2 if args.resume else 1,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            save_strategy="epoch",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Counting(),
        hook=hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8)),
    )
    result = trainer.train(resume_from_checkpoint=args.resume or None)
    if trainer.is_world_process_zero():
        print(f"loss {result.training_loss:.4f} after step {result.global_step} with {trainer.hook}")


if __name__ == "__main__":
    main()

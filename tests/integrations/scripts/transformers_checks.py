"""On each rank: the same training with Transformers' Trainer and with gradwire's."""

import json
import os
import runpy
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from gradwire import hooks
from gradwire.errors import HookError, UsageError
from gradwire.integrations.transformers import GradwireMixin, GradwireTrainer

logging.set_verbosity_error()
example, directory = sys.argv[1:]
FEEDBACK = hooks.chain(hooks.error_feedback(), hooks.quantize(bits=4))
CONFIG = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
said: dict[str, Any] = {}


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Losses(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


class Own(GradwireMixin, Trainer):
    """A subclass of somebody's."""


def train(cls: type[Trainer], name: str, *, resume: Any = None, accumulate: int = 1, **kwargs: Any) -> list[float]:
    """The losses of six steps, or of those that are left."""
    torch.manual_seed(1)
    model = GPT2LMHeadModel(CONFIG)
    arguments = TrainingArguments(
        f"{directory}/{name}",
        max_steps=6 // accumulate,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-2,
        save_strategy="steps",
        save_steps=3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    losses = Losses()
    trainer = cls(model=model, args=arguments, train_dataset=Sequences(), callbacks=[losses], **kwargs)
    trainer.train(resume_from_checkpoint=resume)
    said.setdefault("wrappers", {})[name] = type(trainer.model_wrapped).__module__
    return losses.losses


said["stock"] = train(Trainer, "stock")
said["gradwire"] = train(GradwireTrainer, "gradwire")
said["mean"] = train(Own, "mean", hook=hooks.mean())
said["stock, accumulating"] = train(Trainer, "stock accumulating", accumulate=2)
said["gradwire, accumulating"] = train(GradwireTrainer, "gradwire accumulating", accumulate=2)
said["compressed"] = train(GradwireTrainer, "compressed", hook=FEEDBACK)
checkpoint = f"{directory}/compressed/checkpoint-3"
said["files"] = sorted(name for name in os.listdir(checkpoint) if "gradwire" in name)
said["resumed"] = train(GradwireTrainer, "resumed", hook=FEEDBACK, resume=checkpoint)
with warnings.catch_warnings(record=True) as caught:
    said["from stock"] = train(GradwireTrainer, "from stock", hook=FEEDBACK, resume=f"{directory}/stock/checkpoint-3")
said["warning"] = [str(one.message) for one in caught if "without a state" in str(one.message)]
for wrong in (
    lambda: GradwireTrainer(model=GPT2LMHeadModel(CONFIG), hook=hooks.error_feedback()),  # type: ignore[arg-type]
    lambda: train(GradwireTrainer, "another hook", resume=checkpoint),
):
    try:
        wrong()
    except HookError as error:
        said.setdefault("errors", []).append(str(error))
# A version of Trainer without one of the private methods, and one that has it and does not call it.
for change in ("missing", "not called"):
    prepare = Trainer._prepare_for_training
    del Trainer._prepare_for_training
    try:
        if change == "not called":
            GradwireMixin._prepare_for_training, ours = prepare, GradwireMixin._prepare_for_training
            Trainer._prepare_for_training = prepare
        try:
            train(GradwireTrainer, "another version")
        except UsageError as error:
            said.setdefault("versions", []).append(str(error))
        finally:
            if change == "not called":
                GradwireMixin._prepare_for_training = ours
    finally:
        Trainer._prepare_for_training = prepare
for resume in ([], ["--resume"]):
    sys.argv = [example, "--directory", f"{directory}/example", *resume]
    runpy.run_path(example, run_name="__main__")
print(json.dumps(said))
dist.destroy_process_group()

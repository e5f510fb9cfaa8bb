"""Transformers' Trainer: gradwire's DDP and hooks in place of the wrapper that Trainer builds, and hook state in its checkpoints.

Trainer makes its Accelerator and the settings of DDP itself, so this is a mixin for Trainer or a subclass of it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.integrations.ddp_replacement import replaced_ddp
from gradwire.integrations.installed_hooks import hook_controls, load_hook_states, missing_library, save_hook_states
from gradwire.parallel import DistributedDataParallel

try:
    from accelerate.utils import DistributedDataParallelKwargs
    from transformers import Trainer, __version__ as transformers_version

    from gradwire.integrations.accelerate import GradwireKwargs
except ModuleNotFoundError as error:
    raise missing_library(error, extra="transformers") from error

_OVERRIDDEN = ("_build_accelerator_args", "_prepare_for_training", "_save_optimizer_and_scheduler")
"""Private methods of Trainer that the mixin overrides. One that does not exist, or is not called, would be silently ignored."""
_Base: Any = object  # a type checker must not look for Trainer's methods there


class GradwireMixin(_Base):
    """In front of Trainer, or a subclass of it: `class MyTrainer(GradwireMixin, Seq2SeqTrainer)`.

    The model is wrapped in gradwire's DistributedDataParallel; `hook`, a keyword argument in addition to Trainer's, reduces its
    gradients. Checkpoints contain the hook's state, one file for each rank, unless only the model is saved.
    """

    def __init__(self, *args: Any, hook: CommHook | None = None, **kwargs: Any) -> None:
        if hook is not None:
            check_hooks(type(self).__name__, hook=hook)
        base = super()
        missing = [name for name in _OVERRIDDEN if not hasattr(base, name)]
        if missing:
            raise self._not_supported(f"its Trainer has no {', '.join(missing)}, which gradwire overrides")
        self.hook = hook
        super().__init__(*args, **kwargs)

    def _not_supported(self, why: str) -> UsageError:
        return UsageError(
            f"{type(self).__name__} with transformers {transformers_version}: {why}, so the model would train on torch's DDP, "
            "without the hook. Install another version of transformers, or use gradwire.integrations.accelerate."
        )

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, for a model that gradwire has wrapped or that is not distributed."""
        wrapper = getattr(model, "_orig_mod", model)
        if isinstance(wrapper, TorchDDP) and not isinstance(wrapper, DistributedDataParallel):
            raise self._not_supported("it does not call the methods that gradwire overrides")
        return super().training_step(model, *args, **kwargs)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        arguments["kwargs_handlers"] = [
            GradwireKwargs(hook=self.hook, **handler.to_kwargs())
            if isinstance(handler, DistributedDataParallelKwargs)
            else handler
            for handler in arguments["kwargs_handlers"]
        ]
        return arguments

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        with replaced_ddp():
            model, batches = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        controls = hook_controls(model)
        if controls is not None:
            controls.attach_optimizer(self.optimizer.optimizer)
            if resume_from_checkpoint is not None:
                load_hook_states([model], resume_from_checkpoint)
        return model, batches

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        save_hook_states([self.model_wrapped], output_dir)


class GradwireTrainer(GradwireMixin, Trainer):
    """Transformers' Trainer with gradwire's DDP: `GradwireTrainer(model=..., args=..., hook=...)`."""

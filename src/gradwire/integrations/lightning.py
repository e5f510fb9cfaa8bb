"""PyTorch Lightning: `Trainer(strategy=GradwireStrategy(hook=...))`: gradwire's DDP, and hook state in checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.integrations.installed_hooks import hook_controls, missing_library
from gradwire.interop import register_backend
from gradwire.parallel import DistributedDataParallel

try:
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities import rank_zero_warn
except ModuleNotFoundError as error:
    raise missing_library(error, extra="lightning") from error

_KEY = "gradwire_hook_states"


class GradwireStrategy(DDPStrategy):
    """Lightning's DDPStrategy with gradwire's DistributedDataParallel.

    `hook` is any gradwire hook; torch-style ones are given as for DDPStrategy, `ddp_comm_hook=`, and run on the CPU too, where
    DDPStrategy ignores them. `process_group_backend="gradwire"` needs no further setup. All other arguments are DDPStrategy's.

    Checkpoints contain the hook's state of every rank, which is sent to rank 0 for that.
    """

    model: Any

    def __init__(self, *args: Any, hook: CommHook | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if hook is not None:
            check_hooks("GradwireStrategy", hook=hook)
            if self._ddp_comm_hook is not None:
                raise UsageError(
                    f"GradwireStrategy(hook={hook!r}, ddp_comm_hook={self._ddp_comm_hook!r}): a model has one hook. Choose one."
                )
        self.hook = hook
        self._loaded: dict[str, Any] | None = None
        """The hook's states of all ranks, if a checkpoint was loaded for the model that is set up next."""
        self._last_state: dict[str, Any] | None = None
        """Of this rank, when fitting had ended and the model was unwrapped."""

    def setup_distributed(self) -> None:
        """As in DDPStrategy, with gradwire's backend known to torch."""
        if self._process_group_backend == "gradwire" and not dist.is_backend_available("gradwire"):
            register_backend()
        super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        """As in DDPStrategy; a hook with outer steps follows the optimizers, and continues from the checkpoint."""
        super().setup(trainer)
        loaded, self._loaded = self._loaded, None
        if isinstance(self.model, DistributedDataParallel):  # which it is if it is to be fitted
            self.model.attach_optimizer(*self.optimizers)
            if loaded is not None and hook_controls(self.model) is not None:
                self._restore(self.model, loaded["states"])

    def _setup_model(self, model: nn.Module) -> nn.Module:
        device_ids = self.determine_ddp_device_ids()
        stream = nullcontext() if device_ids is None else torch.cuda.stream(torch.cuda.Stream())
        with stream:
            return DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        if self.hook is not None:
            self.model.set_hook(self.hook)
        elif self._ddp_comm_hook is not None:
            _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As in DDPStrategy, with the hook's states, unless only the weights are saved. Every rank calls it."""
        state = self._hook_state()
        if state is not None and "optimizer_states" in checkpoint:
            states: list[Any] | None = [None] * self.world_size if self.is_global_zero else None
            dist.gather_object(state, states)
            checkpoint[_KEY] = states
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in DDPStrategy. The hook's states are restored when the model has been set up."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        self._loaded = {"states": checkpoint.get(_KEY)}
        return checkpoint

    def teardown(self) -> None:
        """As in DDPStrategy, which unwraps the model. A checkpoint may be saved after that."""
        self._last_state = self._hook_state()
        # Unwrapped here, because DDPStrategy advises static_graph=True as well, which gains nothing with gradwire.
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        super().teardown()

    def _hook_state(self) -> dict[str, Any] | None:
        hook = None if self.model is None else hook_controls(self.model)
        return self._last_state if hook is None else hook.hook_state_dict()

    def _restore(self, model: DistributedDataParallel, states: list[Any] | None) -> None:
        if states is not None:
            own = self.global_rank if self.global_rank < len(states) else 0
            model.load_hook_state_dict(states[own])
        elif self.hook is not None:
            rank_zero_warn(
                "GradwireStrategy: the checkpoint has no state of a gradwire hook, so the hook starts without one."
            )

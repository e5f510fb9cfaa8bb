"""Hugging Face Accelerate: gradwire's hooks on the models that `Accelerator.prepare` wraps, and gradwire's DDP as the wrapper.

Accelerate looks handlers up by `handler.__class__`, in a table of its own classes, so `GradwireKwargs` has its base class there;
`isinstance` and copies still see what it is. `Accelerator.save_state` passes unwrapped models to its hooks; the wrapped ones, which
have the communication hooks, are known to the handler that Accelerate calls for each of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.integrations.ddp_replacement import replaced_ddp
from gradwire.integrations.installed_hooks import install_hook, load_hook_states, missing_library, save_hook_states

try:
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
except ModuleNotFoundError as error:
    raise missing_library(error, extra="accelerate") from error


@dataclass(repr=False)
class GradwireKwargs(DistributedDataParallelKwargs):
    """DistributedDataParallelKwargs with any gradwire hook: `Accelerator(kwargs_handlers=[GradwireKwargs(hook=...)])`.

    The hook reduces the gradients of every model that is prepared, whether its wrapper is torch's DDP, as in Accelerate, or
    gradwire's, as with `GradwireAccelerator`. All other arguments are those of the base class.
    """

    hook: CommHook | None = None

    def __post_init__(self) -> None:
        self._prepared: list[weakref.ref[nn.Module]] = []
        if self.hook is None:
            return
        check_hooks("GradwireKwargs", hook=self.hook)
        if self.comm_hook is not DDPCommunicationHookType.NO or self.comm_wrapper is not DDPCommunicationHookType.NO:
            raise UsageError(
                f"GradwireKwargs(hook={self.hook!r}, comm_hook={self.comm_hook}, comm_wrapper={self.comm_wrapper}): a model has "
                "one hook. Omit hook= for Accelerate's own."
            )

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class under which Accelerate looks for the handler."""
        return DistributedDataParallelKwargs

    def __repr__(self) -> str:
        """The call that makes an equal one: the arguments that differ from their defaults."""
        plain = GradwireKwargs()
        names = [field.name for field in fields(self) if getattr(self, field.name) != getattr(plain, field.name)]
        return f"GradwireKwargs({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def to_dict(
        self, ignore_keys: Sequence[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """The arguments of DistributedDataParallel."""
        arguments: dict[str, Any] = DistributedDataParallelKwargs.to_dict(self, (*ignore_keys, "hook", "_prepared"))
        return arguments

    def register_comm_hook(self, model: nn.Module) -> None:
        """Install the hook. Accelerate calls this for every model that it wraps."""
        self._prepared.append(weakref.ref(model))
        if self.hook is None:
            DistributedDataParallelKwargs.register_comm_hook(self, model)
        else:
            install_hook(model, self.hook)

    @property
    def models(self) -> list[nn.Module]:
        """The models that were prepared with this handler, wrapped, and are still in use."""
        return [model for prepared in self._prepared if (model := prepared()) is not None]


class GradwireAccelerator(Accelerator):
    """Accelerate's Accelerator, which prepares models with gradwire's DistributedDataParallel.

    A hook is given as for Accelerate's own, `kwargs_handlers=[GradwireKwargs(hook=...)]`, or later by `model.set_hook`. Its state
    is saved by `save_state` and restored by `load_state`.
    """

    ddp_handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ddp_handler is None:
            self.ddp_handler = GradwireKwargs()
        if isinstance(self.ddp_handler, GradwireKwargs):
            checkpoint_hook_states(self)

    def prepare_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        """As in Accelerate."""
        with replaced_ddp():
            model: nn.Module = super().prepare_model(*args, **kwargs)
        return model


def checkpoint_hook_states(accelerator: Any) -> None:
    """Make `accelerator.save_state` and `load_state` save and restore the states of gradwire's hooks, one file for each rank.

    The accelerator must have a `GradwireKwargs` handler. A `GradwireAccelerator` does this itself.
    """
    handler = accelerator.ddp_handler
    if not isinstance(handler, GradwireKwargs):
        raise UsageError(
            f"checkpoint_hook_states(accelerator): its handler of DDP is {handler!r}. Make it with "
            "Accelerator(kwargs_handlers=[GradwireKwargs(hook=...)])."
        )
    accelerator.register_save_state_pre_hook(
        lambda models, weights, directory: save_hook_states(handler.models, directory)
    )
    accelerator.register_load_state_pre_hook(lambda models, directory: load_hook_states(handler.models, directory))

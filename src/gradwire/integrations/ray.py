"""Ray Train: `TorchTrainer(..., torch_config=GradwireConfig())`, and `prepare_model` with gradwire's DDP and hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from gradwire.errors import UsageTypeError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.integrations.installed_hooks import missing_library
from gradwire.interop import register_backend
from gradwire.parallel import DistributedDataParallel

try:
    import ray.train.torch
    from ray.train.torch.config import TorchConfig, _TorchBackend
except ModuleNotFoundError as error:
    raise missing_library(error, extra="ray") from error


@dataclass
class GradwireConfig(TorchConfig):
    """Ray's TorchConfig for workers whose process group is a gradwire group, with deadlines and errors that name ranks."""

    backend: str | None = "gradwire"

    @property
    def backend_cls(self) -> type[Any]:
        """What sets the workers up."""
        return _GradwireBackend


class _GradwireBackend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(register_backend)
        super().on_start(worker_group, backend_config)


_OTHERS = {
    "device_ids": "the worker's device is used",
    "move_to_device": "the model is moved to the worker's device",
    "parallel_strategy": "the model is wrapped in gradwire's DistributedDataParallel",
    "parallel_strategy_kwargs": "pass arguments of DistributedDataParallel as keywords",
}
"""Arguments of Ray's function, or of DDP, that have no place in ours, and what to know instead."""


def prepare_model(model: nn.Module, *, hook: CommHook | None = None, **ddp: Any) -> DistributedDataParallel:
    """In a worker: move the model to the worker's device and wrap it in gradwire's DDP. `ddp` are arguments of that class.

    As `ray.train.torch.prepare_model`, with any gradwire hook; with one worker the model is wrapped too.
    """
    if not isinstance(model, nn.Module):
        raise UsageTypeError(f"prepare_model({model!r}): the model must be an nn.Module, got {type(model).__name__}.")
    for name in ddp.keys() & _OTHERS.keys():
        raise UsageTypeError(
            f"prepare_model({type(model).__name__}, {name}={ddp[name]!r}): gradwire's prepare_model has no such argument: "
            f"{_OTHERS[name]}. Omit {name}=."
        )
    if hook is not None:
        check_hooks("prepare_model", hook=hook)
    device = ray.train.torch.get_device()
    model = model.to(device)
    wrapped = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device], **ddp)
    if hook is not None:
        wrapped.set_hook(hook)
    return wrapped

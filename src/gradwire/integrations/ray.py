"""Ray Train: `TorchTrainer(..., torch_config=GradwireConfig())`, and `prepare_model` with gradwire's DDP and hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.integrations.missing_library import missing_library
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


def prepare_model(model: nn.Module, *, hook: CommHook | None = None, **ddp: Any) -> DistributedDataParallel:
    """In a worker: move the model to the worker's device and wrap it in gradwire's DDP. `ddp` are arguments of that class.

    As `ray.train.torch.prepare_model`, with any gradwire hook; with one worker the model is wrapped too.
    """
    if hook is not None:
        check_hooks("prepare_model", hook=hook)
    device = ray.train.torch.get_device()
    model = model.to(device)
    wrapped = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device], **ddp)
    if hook is not None:
        wrapped.set_hook(hook)
    return wrapped

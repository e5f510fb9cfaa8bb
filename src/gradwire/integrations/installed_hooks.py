"""The gradwire hook of a data-parallel model, torch's DDP or gradwire's: installed, saved and restored alike."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks.base import CommHook
from gradwire.interop import as_torch_hook
from gradwire.interop.ddp_hook import TorchDdpHook
from gradwire.parallel import DistributedDataParallel


def install_hook(model: nn.Module, hook: CommHook) -> None:
    """Reduce the gradients of `model`, torch's DDP or gradwire's, with `hook`. Every rank calls it, before the first step."""
    if isinstance(model, DistributedDataParallel):
        model.set_hook(hook)
    elif isinstance(model, TorchDDP):
        adapted = as_torch_hook(hook, named_parameters=model.module.named_parameters())
        model.register_comm_hook(model.process_group, adapted)
    else:
        raise UsageTypeError(
            f"install_hook({type(model).__name__}, {hook!r}): the model must be a DistributedDataParallel, torch's or gradwire's."
        )


def hook_controls(model: nn.Module) -> DistributedDataParallel | TorchDdpHook | None:
    """The gradwire hook of `model`, compiled or not; None if it is not a DDP, or has a torch-style hook or none."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return model if model.replica.runner.torch_hook is None else None
    hooks = getattr(model, "_comm_hooks", ()) if isinstance(model, TorchDDP) else ()
    return next((hook for hook, _ in hooks if hasattr(hook, "hook_state_dict")), None)


def save_hook_states(models: Sequence[nn.Module], directory: str | Path) -> None:
    """Write the states of the models' hooks to a file of this rank in `directory`. Every rank calls it."""
    states = [None if hook is None else hook.hook_state_dict() for hook in map(hook_controls, models)]
    if any(state is not None for state in states):
        path = _file(Path(directory), dist.get_rank())
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(states, path)


def load_hook_states(models: Sequence[nn.Module], directory: str | Path) -> None:
    """Restore what `save_hook_states` wrote. Every rank calls it; one that has no file there loads that of rank 0.

    A checkpoint without any such file was saved without a gradwire hook: hooks start without a state then, with a warning.
    """
    if all(hook_controls(model) is None for model in models):
        return
    own = _file(Path(directory), dist.get_rank())
    path = own if own.exists() else _file(Path(directory), 0)
    found: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(found, path.exists())
    if not any(found):
        warnings.warn(
            f"load_hook_states({str(directory)!r}): there is no {own.name}, so hooks start without a state.",
            stacklevel=2,
        )
        return
    if not all(found):
        missing = [rank for rank, here in enumerate(found) if not here]
        raise UsageError(
            f"load_hook_states({str(directory)!r}): ranks {missing} find neither their own file nor {_file(Path(), 0)} there. Copy "
            "the files of all ranks to every host."
        )
    states = torch.load(path, weights_only=True)
    if len(states) != len(models):
        raise UsageError(
            f"load_hook_states({str(directory)!r}): it has states of {len(states)} models, and there are {len(models)}."
        )
    for model, state in zip(models, states, strict=True):
        hook = hook_controls(model)
        if hook is not None and state is not None:
            hook.load_hook_state_dict(state)


def _file(directory: Path, rank: int) -> Path:
    return directory / f"gradwire-hook-{rank}.pt"


def missing_library(error: ModuleNotFoundError, *, extra: str) -> ImportError:
    """An ImportError that names the extra which installs the library.

    >>> missing_library(ModuleNotFoundError("No module named 'ray'"), extra="ray")
    ImportError("No module named 'ray'. gradwire.integrations.ray needs it: pip install 'gradwire[ray]'")
    """
    return ImportError(
        f"{error}. gradwire.integrations.{extra} needs it: pip install 'gradwire[{extra}]'", name=error.name
    )

"""gradwire's DistributedDataParallel under torch's name, for code that builds torch's.

References in `torch.nn.parallel` and its module `distributed` are replaced. A reference that a module has imported before is not:
in torch itself those serve `isinstance`, which is True for both classes, and elsewhere `replace_ddp` raises. A forked process
inherits the replacement; one that multiprocessing spawns unpickles it before it imports the script.
"""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.nn.parallel
import torch.nn.parallel.distributed

from gradwire.errors import UsageError
from gradwire.hooks.arguments import check_hooks
from gradwire.hooks.base import CommHook
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.parallel import DistributedDataParallel

_PLACES: tuple[tuple[Any, str], ...] = (
    (torch.nn.parallel, "DistributedDataParallel"),
    (torch.nn.parallel.distributed, "DistributedDataParallel"),
    (torch.nn.parallel, "DistributedDataParallelCPU"),  # its old name
)
_STOCK = tuple(getattr(module, name) for module, name in _PLACES)


def replace_ddp(*, hook: CommHook | str | None = None) -> None:
    """Make torch.nn.parallel.DistributedDataParallel gradwire's, for the rest of this process and those that it starts.

    Call it before anything imports torch's class, or start the script with `gradwire run --replace-ddp`. Models reduce their
    gradients by `hook`, or the one of that name (`hooks.named`), until the script registers another.
    """
    found = DistributedDataParallel.default_hook if hook is None else _found(hook)
    if not all(getattr(module, name) is DistributedDataParallel for module, name in _PLACES):
        early = [found for module in list(sys.modules) for found in _references(module)]
        if early:
            raise UsageError(
                f"replace_ddp(): torch's DistributedDataParallel was imported before, as {', '.join(early)}. Call replace_ddp() "
                "first, or start the script with gradwire run --replace-ddp."
            )
        _replace()
        prepare = multiprocessing.spawn.get_preparation_data
        multiprocessing.spawn.get_preparation_data = lambda name: {**prepare(name), "gradwire": _ReplaceWhenUnpickled()}
    DistributedDataParallel.default_hook = found


def _found(hook: CommHook | str) -> CommHook:
    if isinstance(hook, str):
        named = NAMED_HOOKS.get(hook)
        if named is None or named.needs_optimizer:
            known = ", ".join(name for name, one in NAMED_HOOKS.items() if not one.needs_optimizer)
            raise UsageError(f"replace_ddp(hook={hook!r}): there is no such hook for gradients. Known ones: {known}.")
        return named.build()
    check_hooks("replace_ddp", hook=hook)
    if hook.local:
        raise UsageError(
            f"replace_ddp(hook={hook!r}): it needs the optimizer, which this function does not know. Call model.set_hook and "
            "model.attach_optimizer in the script."
        )
    return hook


@contextmanager
def replaced_ddp() -> Iterator[None]:
    """gradwire's class under torch's name while the block runs, for a library that builds the model in one call."""
    before = [getattr(module, name) for module, name in _PLACES]
    _replace()
    try:
        yield
    finally:
        for (module, name), cls in zip(_PLACES, before, strict=True):
            setattr(module, name, cls)


def _replace() -> None:
    for module, name in _PLACES:
        setattr(module, name, DistributedDataParallel)


def _references(name: str) -> list[str]:
    """The names under which a module outside of torch and gradwire has torch's class."""
    if name.partition(".")[0] in ("torch", "gradwire"):
        return []
    variables: dict[str, Any] = getattr(sys.modules[name], "__dict__", {})
    return [f"{name}.{key}" for key, value in list(variables.items()) if any(value is stock for stock in _STOCK)]


class _ReplaceWhenUnpickled:
    """In what multiprocessing sends to a process that it spawns."""

    def __reduce__(self) -> Any:
        return partial(replace_ddp, hook=DistributedDataParallel.default_hook), ()

"""ModuleState: makes the parameters and buffers of a replicated module equal on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.parallel.broadcast import broadcast_coalesced
from gradwire.policies import Buffers

_BROADCAST_BYTES = 250 * 2**20


class ModuleState:
    """The state of one module. The module is held weakly: it, or its wrapper, owns this."""

    def __init__(self, module: nn.Module, group: Group, *, buffers: Buffers, ignore: Collection[str]) -> None:
        self.group = group
        self.buffers = buffers
        self.ignore = frozenset(ignore)
        self._module = weakref.ref(module)
        self._has_buffers = any(n not in self.ignore for n, _ in module.named_buffers())

    @property
    def module(self) -> nn.Module:
        """The replicated module."""
        module = self.module_or_none
        if module is None:
            raise UsageError("the replicated module is gone. Keep a reference to it.")
        return module

    @property
    def module_or_none(self) -> nn.Module | None:
        """The replicated module, or None if it has been freed."""
        return self._module()

    def named_buffers(self) -> dict[str, Tensor]:
        """The module's buffers, looked up each time: modules may reassign them.

        As in torch, a module that had none when it was replicated is not searched again: the search takes as long as a bucket.
        """
        if not self._has_buffers:
            return {}
        return {n: b for n, b in self.module.named_buffers() if n not in self.ignore}

    def sync_buffers(self, src: int = 0) -> None:
        """Make buffers equal to those of `src`, without invalidating what autograd has saved of them."""
        buffers = list(self.named_buffers().values())
        if buffers:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
                broadcast_coalesced(self.group, buffers, buffer_size=_BROADCAST_BYTES, src=src)

    def broadcast(self, src: int = 0) -> None:
        """Make parameters, and buffers unless they are never synchronized, equal to those of `src`."""
        tensors: list[Tensor] = [p for n, p in self.module.named_parameters() if n not in self.ignore]
        if self.buffers is not Buffers.NEVER:
            tensors += list(self.named_buffers().values())
        broadcast_coalesced(self.group, tensors, buffer_size=_BROADCAST_BYTES, src=src)

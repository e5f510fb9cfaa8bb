"""ModuleState: makes the parameters and buffers of a replicated module equal on all ranks.

It also warns when one rank's parameters are saved while the ranks' parameters differ, as between outer steps of DiLoCo.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradwire.collectives import broadcast
from gradwire.errors import UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.policies import Buffers
from gradwire.reducer.hook.outer_optimizer import OuterOptimizer
from gradwire.reducer.hook.runner import HookRunner

_BROADCAST_BYTES = 250 * 2**20


class UnequalReplicas(UserWarning):
    """`state_dict()` of a model whose replicas differ."""


class ModuleState:
    """The state of one module. The module is held weakly: it, or its wrapper, owns this."""

    def __init__(self, module: nn.Module, group: Group, *, buffers: Buffers, ignore: Collection[str]) -> None:
        self.group = group
        self.buffers = buffers
        self.ignore = frozenset(ignore)
        self._module = weakref.ref(module)
        self._warning: Handle | None = None
        self._place: tuple[weakref.ref[nn.Module], str] | None = None
        self._has_buffers = any(n not in self.ignore for n, _ in module.named_buffers())

    @property
    def module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise UsageError("the replicated module is gone. Keep a reference to it.")
        return module

    def holds_another(self, parameter: nn.Parameter) -> bool:
        """Whether the module has another tensor now in place of this parameter, always the same one."""
        if self._place is None:
            for module in self.module.modules():
                for name, held in module._parameters.items():
                    if held is parameter:
                        self._place = weakref.ref(module), name
                        return False
            return True
        owner = self._place[0]()
        return owner is None or owner._parameters.get(self._place[1]) is not parameter

    def named_buffers(self) -> dict[str, Tensor]:
        """The module's buffers, looked up each time: modules may reassign them. As in torch, a module that had none when it was
        replicated is not searched again: the search takes as long as a bucket."""
        if not self._has_buffers:
            return {}
        return {n: b for n, b in self.module.named_buffers() if n not in self.ignore}

    def copied_buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.named_buffers().items()}

    def restore_buffers(self, copies: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self.named_buffers().items():
                if name in copies:
                    buffer.copy_(copies[name])

    def sync_buffers(self, src: int = 0) -> None:
        """Make buffers equal to those of `src`, without invalidating what autograd has saved of them."""
        buffers = list(self.named_buffers().values())
        if buffers:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
                broadcast_coalesced(self.group, buffers, src=src)

    def broadcast(self, src: int = 0) -> None:
        """Make parameters, and buffers unless they are never synchronized, equal to those of `src`."""
        tensors: list[Tensor] = [p for n, p in self.module.named_parameters() if n not in self.ignore]
        if self.buffers is not Buffers.NEVER:
            tensors += list(self.named_buffers().values())
        broadcast_coalesced(self.group, tensors, src=src)

    def warn_when_saved(self, runner: HookRunner | None) -> None:
        """Warn from now on when `state_dict()` is called while the ranks' parameters differ; with None, do not."""
        if self._warning is not None:
            self._warning.remove()
            self._warning = None
        module = self._module()
        if runner is not None and module is not None:
            self._warning = Handle(module.register_state_dict_pre_hook(_Warning(runner)).remove)


class _Warning:
    """The hook on `state_dict()`. In a copy or a pickle of the module it does nothing."""

    def __init__(self, runner: HookRunner | None = None) -> None:
        self._runner = None if runner is None else weakref.ref(runner)
        self._warned: weakref.ref[OuterOptimizer] | None = None

    def __call__(self, *_: Any) -> None:
        runner = None if self._runner is None else self._runner()
        outer = None if runner is None else runner.outer
        if outer is None or not outer.differ or (self._warned is not None and self._warned() is outer):
            return
        self._warned = weakref.ref(outer)
        warnings.warn(
            f"state_dict() on rank {outer.group.rank} after step {outer.step} with {outer.hook!r}: the ranks' parameters differ, "
            "and these are this rank's. Call average_parameters() on every rank first to save one model. To resume from here "
            "later, save state_dict() and hook_state_dict() on every rank.",
            UnequalReplicas,
            stacklevel=4,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _Warning, ()


_IN_FLIGHT = 2


def _buffers(rows: Sequence[Tensor], buffer_size: int) -> Iterator[list[Tensor]]:
    """Views of all elements, in lists of one dtype and device and at most `buffer_size` bytes.

    >>> [[view.numel() for view in buffer] for buffer in _buffers([torch.zeros(5), torch.zeros(2)], 12)]
    [[3], [2], [2]]
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for row in rows:
        views = row.split(max(1, buffer_size // row.itemsize)) if row.numel() else ()
        by_kind.setdefault((row.dtype, row.device), []).extend(views)
    for views in by_kind.values():
        buffer, room = views[:1], buffer_size
        for before, view in pairwise(views):
            room -= before.nbytes
            if view.nbytes > room:
                yield buffer
                buffer, room = [], buffer_size
            buffer.append(view)
        if buffer:
            yield buffer


@torch.no_grad()
def broadcast_coalesced(
    group: Group, tensors: Sequence[Tensor], *, buffer_size: int = _BROADCAST_BYTES, src: int = 0
) -> None:
    """Make `tensors` equal to those of rank `src`, in place, with two buffers in flight at a time. A no-op without tensors."""
    tensors = list(tensors)
    for t in tensors:
        if not isinstance(t, Tensor) or t.layout is not torch.strided:
            what = f"a {t.layout} tensor" if isinstance(t, Tensor) else type(t).__name__
            raise UsageTypeError(f"broadcast_coalesced: expected dense tensors, got {what}.")
    if buffer_size <= 0:
        raise UsageError(f"broadcast_coalesced: buffer_size {buffer_size}. It must be more than 0 bytes.")
    if not 0 <= src < group.size:
        raise UsageError(f"broadcast_coalesced: src {src}, but the group has ranks 0 to {group.size - 1}.")
    flat = [t.detach().resolve_conj().resolve_neg().reshape(-1) for t in tensors]  # copies of what is not plain memory
    flight: deque[tuple[Work, list[Tensor], Tensor]] = deque()

    def land() -> None:
        work, views, buffer = flight.popleft()
        work.wait()
        if len(views) > 1:
            torch._foreach_copy_(views, list(buffer.split([view.numel() for view in views])))

    for number, views in enumerate(_buffers(flat, buffer_size)):
        buffer = views[0] if len(views) == 1 else torch.cat(views)
        flight.append((group.submit(broadcast(buffer, src=src, label=f"broadcast_coalesced {number}")), views, buffer))
        if len(flight) == _IN_FLIGHT:
            land()
    while flight:
        land()
    for t, row in zip(tensors, flat, strict=True):
        if row.data_ptr() != t.data_ptr():
            t.detach().copy_(row.view(t.shape))

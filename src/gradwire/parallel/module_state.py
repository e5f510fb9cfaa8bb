"""ModuleState: makes the parameters and buffers of a replicated module equal on all ranks.

It also warns when one rank's parameters are saved while the ranks' parameters differ, as between outer steps of DiLoCo.
"""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        """The module's buffers, looked up each time: modules may reassign them.

        As in torch, a module that had none when it was replicated is not searched again: the search takes as long as a bucket.
        """
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


Piece = tuple[int, int, int]
"""(tensor index, first element, one past the last)."""

_IN_FLIGHT = 2


def plan(tensors: Sequence[Tensor], buffer_size: int) -> Iterator[list[Piece]]:
    """Assign the tensors to buffers of one dtype and device and at most `buffer_size` bytes, splitting larger tensors.

    >>> list(plan([torch.zeros(3), torch.zeros(2), torch.zeros(1, dtype=torch.int64)], buffer_size=16))
    [[(0, 0, 3), (1, 0, 1)], [(1, 1, 2)], [(2, 0, 1)]]
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(tensors):
        by_kind.setdefault((t.dtype, t.device), []).append(i)
    for (dtype, _), indices in by_kind.items():
        room = capacity = max(1, buffer_size // dtype.itemsize)
        pieces: list[Piece] = []
        for i in indices:
            start, numel = 0, tensors[i].numel()
            while start < numel:
                stop = min(numel, start + room)
                pieces.append((i, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield pieces
                    pieces, room = [], capacity
        if pieces:
            yield pieces


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
    flat = [t.detach().reshape(-1) for t in tensors]  # copies of those that are not contiguous
    flight: deque[tuple[Work, list[Piece], Tensor]] = deque()

    def land() -> None:
        work, pieces, buffer = flight.popleft()
        work.wait()
        parts = buffer.split([stop - start for _, start, stop in pieces])
        for (i, start, stop), part in zip(pieces, parts, strict=True):
            if flat[i][start:stop].data_ptr() != part.data_ptr():
                flat[i][start:stop].copy_(part)

    for number, pieces in enumerate(plan(tensors, buffer_size)):
        rows = [flat[i][start:stop] for i, start, stop in pieces]
        buffer = rows[0] if len(rows) == 1 else torch.cat(rows)
        flight.append((group.submit(broadcast(buffer, src=src, label=f"broadcast_coalesced {number}")), pieces, buffer))
        if len(flight) == _IN_FLIGHT:
            land()
    while flight:
        land()
    for t, row in zip(tensors, flat, strict=True):
        if not t.is_contiguous():
            t.detach().copy_(row.view(t.shape))

"""Delayed all-reduce: chosen parameters skip the buckets and are averaged together when one parameter's gradient is ready."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.autograd.backward_end import at_backward_end
from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.parallel.broadcast import broadcast_coalesced
from gradwire.runtime.threads import weakly


class Delayed:
    """Parameters whose gradients live in one separate buffer."""

    def __init__(self, group: Group, named: list[tuple[str, nn.Parameter]], trigger: nn.Parameter) -> None:
        self._group = group
        self._names = {name for name, _ in named}
        self._parameters = [p for _, p in named]
        first = self._parameters[0]
        broadcast_coalesced(group, self._parameters, src=0)
        size = sum(p.numel() for p in self._parameters)
        self._buffer = torch.zeros(size, dtype=first.dtype, device=first.device)
        self._views: list[Tensor] = []
        offset = 0
        for p in self._parameters:
            self._views.append(self._buffer[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()
        launch = weakly(self._launch)  # parameters own their hooks; a hook that owned parameters would be a cycle
        trigger.register_hook(lambda grad: launch())

    @classmethod
    def of(cls, ddp: Any, named: Any, trigger: Any) -> Delayed | None:
        """From the two arguments of torch's constructor, which must be given together; None if neither is."""
        if (named is None) != (trigger is None):
            raise UsageError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time."
            )
        if named is None:
            return None
        named = list(named)
        ddp.parameters_to_ignore |= {name for name, _ in named}
        return cls(ddp.group, named, trigger)

    def covers(self, module: nn.Module, ignore: Collection[str]) -> bool:
        """Whether no parameter is left for buckets."""
        return all(name in ignore for name, p in module.named_parameters() if p.requires_grad)

    def _launch(self) -> None:
        work = self._group.submit(all_reduce(self._buffer, op=ReduceOp.AVG, label="delayed all-reduce"))
        at_backward_end(lambda: work.wait())

    def after_forward(self, output: Any) -> Any:
        """Make gradients accumulate into the buffer: every `.grad` that is None becomes a zeroed view of its slice."""
        if all(p.grad is None for p in self._parameters):
            self._buffer.zero_()
        for p, view in zip(self._parameters, self._views, strict=True):
            if p.grad is None:
                p.grad = view.zero_()
        return output

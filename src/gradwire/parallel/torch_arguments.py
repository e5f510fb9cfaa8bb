"""The arguments of torch's constructor: flags as policies, checked `device_ids`, parameters whose all-reduce is delayed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradwire.autograd.backward_end import at_backward_end
from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.parallel.module_state import broadcast_coalesced
from gradwire.parallel.trainable import refuse_meta_tensors
from gradwire.policies import BucketMemory, Buckets, Buffers, MiB
from gradwire.runtime.threads import weakly


def buffers_policy(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> Buffers:
    """The old flag also controls the synchronization at start, the new one does not."""
    if broadcast_buffers is not None:
        text = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`, which keeps the synchronization at start."
        )
        if forward_sync_buffers is not None:
            text = "`broadcast_buffers` is deprecated, and ignored because `forward_sync_buffers` is given too."
        warnings.warn(text, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return Buffers.EVERY_FORWARD if forward_sync_buffers else Buffers.AT_START
    return Buffers.NEVER if broadcast_buffers is False else Buffers.EVERY_FORWARD


def buckets_policy(cap_mb: float | None, cap_mb_list: Sequence[float] | None, *, lazy: bool = False) -> Buckets:
    """The first bucket is small only if the user did not choose a size."""
    memory = BucketMemory.DURING_BACKWARD if lazy else BucketMemory.KEPT
    if cap_mb_list:
        return Buckets(tuple(int(mb * MiB) for mb in cap_mb_list), from_start=True, memory=memory)
    if cap_mb is None:
        return Buckets(memory=memory)
    return Buckets((max(1, int(cap_mb * MiB)),), memory=memory)


def check_devices(
    module: nn.Module, ignore: Collection[str], device_ids: Any, output_device: Any
) -> tuple[list[int] | None, int | None, torch.device, str]:
    """(device_ids, output_device, the module's first device, its type); errors have torch's wording."""
    refuse_meta_tensors(module, ignore)
    devices = {p.device for n, p in module.named_parameters() if n not in ignore}
    types = {d.type for d in devices}
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError("device_ids can only be None or contain a single element.")
    if len(types) > 1:
        raise UsageError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters locate "
            f"in {sorted(types)}."
        )
    device = next(iter(p.device for n, p in module.named_parameters() if n not in ignore), torch.device("cpu"))
    if device_ids is None or len(device_ids) == 0 or device.type == "cpu" or len(devices) > 1:
        if device_ids or output_device is not None:
            raise UsageError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device "
                f"GPU modules or CPU modules, but got device_ids {device_ids}, output_device {output_device}, and module "
                f"parameters { {str(d) for d in devices} }."
            )
        return None, None, device, device.type
    first = _index(device_ids[0])
    return [first], first if output_device is None else _index(output_device), device, device.type


def _index(device: Any) -> int:
    return device if isinstance(device, int) else torch.device(device).index or 0


def move_to(inputs: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    """Move tensors in positional and keyword inputs to `device`, and anything else with a `.to` method (packed sequences)."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor) or (hasattr(value, "to") and hasattr(value, "data")):
            return value.to(device, non_blocking=True)
        return value

    moved: tuple[Any, Any] = tree_map(
        move, (inputs, kwargs), is_leaf=lambda v: isinstance(v, nn.utils.rnn.PackedSequence)
    )
    return moved


class Delayed:
    """Parameters that skip the buckets and are averaged in one buffer when the gradient of `trigger` is ready."""

    def __init__(self, group: Group, parameters: list[nn.Parameter], trigger: nn.Parameter) -> None:
        self._group = group
        self._parameters = parameters
        first = parameters[0]
        broadcast_coalesced(group, self._parameters, src=0)
        sizes = [p.numel() for p in self._parameters]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views = [part.view(p.shape) for part, p in zip(self._buffer.split(sizes), self._parameters, strict=True)]
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
        parameters = dict(named)
        ddp.parameters_to_ignore |= parameters.keys()
        return cls(ddp.group, list(parameters.values()), trigger)

    def covers(self, module: nn.Module, ignore: Collection[str]) -> bool:
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

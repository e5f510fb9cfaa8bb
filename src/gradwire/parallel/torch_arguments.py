"""The arguments of torch's constructor: flags are turned into policies, `device_ids` are checked against the module."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradwire.errors import UsageError
from gradwire.parallel.trainable import refuse_meta_tensors
from gradwire.policies import BucketMemory, Buckets, Buffers, Gradients, Graph, MiB


@dataclass(frozen=True, slots=True)
class Flags:
    """The arguments of torch's constructor that control reduction."""

    find_unused: bool = False
    static: bool = False
    views: bool = False
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    cap_mb: float | None = None
    cap_mb_list: tuple[float, ...] = ()
    skip_unused: bool = False
    lazy_buckets: bool = False
    check_reduction: bool = False

    def __post_init__(self) -> None:
        if self.check_reduction:
            warnings.warn("`check_reduction` is deprecated and does nothing.", FutureWarning, stacklevel=4)
        if self.broadcast_buffers is None:
            return
        if self.forward_sync_buffers is not None:
            text = "`broadcast_buffers` is deprecated, and ignored because `forward_sync_buffers` is given too."
        else:
            text = "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`, which keeps the synchronization at start."
        warnings.warn(text, FutureWarning, stacklevel=4)

    @property
    def graph(self) -> Graph:
        """Static takes precedence over searching, as in torch."""
        if self.static:
            return Graph.STATIC
        return Graph.FIND_UNUSED if self.find_unused else Graph.ALL_USED

    @property
    def gradients(self) -> Gradients:
        """Where `.grad` lives."""
        return Gradients.VIEWS if self.views else Gradients.COPIES

    @property
    def buffers(self) -> Buffers:
        """The old flag also controls the synchronization at start, the new one does not."""
        if self.forward_sync_buffers is not None:
            return Buffers.EVERY_FORWARD if self.forward_sync_buffers else Buffers.AT_START
        return Buffers.NEVER if self.broadcast_buffers is False else Buffers.EVERY_FORWARD

    @property
    def bytes_cap_list(self) -> tuple[int, ...]:
        """Caps of single buckets, in bytes."""
        return tuple(int(mb * MiB) for mb in self.cap_mb_list)

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest bucket, in bytes."""
        if self.cap_mb_list:
            return max(self.bytes_cap_list)
        return int((25 if self.cap_mb is None else self.cap_mb) * MiB)

    @property
    def buckets(self) -> Buckets:
        """The first bucket is small only if the user did not choose a size."""
        memory = BucketMemory.DURING_BACKWARD if self.lazy_buckets else BucketMemory.KEPT
        if self.cap_mb_list:
            return Buckets(self.bytes_cap_list, from_start=True, memory=memory)
        if self.cap_mb is None:
            return Buckets(memory=memory)
        return Buckets((max(1, self.bucket_bytes_cap),), memory=memory)


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
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


def move_to(inputs: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any]:
    """Move tensors in positional and keyword inputs to `device`, and anything else with a `.to` method (packed sequences)."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor) or (hasattr(value, "to") and hasattr(value, "data")):
            return value.to(device, non_blocking=True)
        return value

    is_leaf = lambda v: isinstance(v, nn.utils.rnn.PackedSequence)  # noqa: E731
    return tree_map(move, inputs, is_leaf=is_leaf), tree_map(move, kwargs, is_leaf=is_leaf)

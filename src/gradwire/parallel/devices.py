"""Checks a module's devices against torch's `device_ids`, and moves inputs to them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gradwire.errors import UsageError


def check_devices(
    module: nn.Module, ignore: Collection[str], device_ids: Any, output_device: Any
) -> tuple[list[int] | None, int | None, torch.device, str]:
    """(device_ids, output_device, the module's first device, its type); errors have torch's wording."""
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

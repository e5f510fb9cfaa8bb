"""Hook state by parameter: what lies flat in a bucket, taken apart by name and put together again for other buckets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.bucket import BucketSpec


def split_flat(flat: Tensor, spec: BucketSpec) -> dict[str, Tensor]:
    """Each parameter's part of `flat`, copied, in its order in memory."""
    return {
        name: flat.narrow(0, offset, numel).clone()
        for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True)
    }


def join_flat(
    saved: Mapping[str, Any], spec: BucketSpec, *, dtype: torch.dtype | None = None, fill: float = 0.0
) -> Tensor:
    """One flat tensor of the parameters' saved parts; `fill` where nothing, or a part of another size, was saved."""
    flat = torch.full((spec.numel,), fill, dtype=dtype or spec.dtype, device=spec.device)
    for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True):
        part = saved.get(name)
        if isinstance(part, Tensor) and part.numel() == numel:
            flat.narrow(0, offset, numel).copy_(part.reshape(-1))
    return flat


def pick(saved: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Of states that hold several things per parameter, one: `{name: parts[key]}` where there is one."""
    return {name: parts[key] for name, parts in saved.items() if isinstance(parts, Mapping) and key in parts}


def add_owed(*parts: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """What several hooks owe, by parameter, in all; None if one of them cannot tell."""
    total: dict[str, Tensor] = {}
    for part in parts:
        if part is None:
            return None
        for name, owed in part.items():
            total[name] = total[name] + owed if name in total else owed
    return total


def bundle(**parts: Mapping[str, Any]) -> dict[str, Any]:
    """Several things per parameter as one state: the other way round."""
    names = dict.fromkeys(name for part in parts.values() for name in part)
    return {name: {key: part[name] for key, part in parts.items() if name in part} for name in names}

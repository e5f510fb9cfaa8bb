"""Hook state by parameter: flat tensors of a bucket, split by name and joined again for other buckets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.bucket import BucketSpec


def split_flat(flat: Tensor, spec: BucketSpec) -> dict[str, Tensor]:
    """A copy of each parameter's part of `flat`, in memory order."""
    return {
        name: flat.narrow(0, offset, numel).clone()
        for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True)
    }


def join_flat(
    saved: Mapping[str, Any], spec: BucketSpec, *, dtype: torch.dtype | None = None, fill: float = 0.0
) -> Tensor:
    """The parameters' saved parts as one flat tensor; `fill` for what was not saved, or (with a warning) in another size."""
    flat = torch.full((spec.numel,), fill, dtype=dtype or spec.dtype, device=spec.device)
    for name, offset, numel in zip(spec.names, spec.offsets, spec.numels, strict=True):
        part = saved.get(name)
        if isinstance(part, Tensor) and part.numel() == numel:
            flat.narrow(0, offset, numel).copy_(part.reshape(-1))
        elif isinstance(part, Tensor):
            warnings.warn(
                f"loading the state of a hook: that of {name} has {part.numel()} values, and the parameter has {numel}. It starts "
                "without one. Load the state that was saved with this model.",
                stacklevel=2,
            )
    return flat


def pick(saved: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The inverse of `bundle` for one key: `{name: parts[key]}` for the parameters that have it."""
    return {name: parts[key] for name, parts in saved.items() if isinstance(parts, Mapping) and key in parts}


def add_owed(*parts: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    """The sum of what several hooks owe, by parameter; None if that is unknown for one of them."""
    total: dict[str, Tensor] = {}
    for part in parts:
        if part is None:
            return None
        for name, owed in part.items():
            total[name] = total[name] + owed if name in total else owed
    return total


def bundle(**parts: Mapping[str, Any]) -> dict[str, Any]:
    """Several values per parameter as one state: `{name: {key: part[name]}}`."""
    names = dict.fromkeys(name for part in parts.values() for name in part)
    return {name: {key: part[name] for key, part in parts.items() if name in part} for name in names}


def held(value: Any) -> list[Any]:
    """What a container contains, or anything else has as attributes."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, Sequence | Set):
        return list(value)
    found = [cls.__dict__.get("__slots__", ()) for cls in type(value).__mro__]
    slots = [name for names in found for name in ([names] if isinstance(names, str) else names)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]

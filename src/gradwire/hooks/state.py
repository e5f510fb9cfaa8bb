"""Hook state by parameter: flat tensors of a bucket, split by name and joined again for other buckets."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
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


def join_flat(saved: Mapping[str, Any], spec: BucketSpec, *, dtype: torch.dtype | None = None) -> Tensor:
    """The parameters' saved parts as one flat tensor; zeros for what was not saved, or (with a warning) in another size."""
    flat = torch.zeros(spec.numel, dtype=dtype or spec.dtype, device=spec.device)
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


Owed = list[tuple[str, Tensor]]
"""What a rank owes: parameters, each with a tensor of a saved state. A parameter may have several."""


def join_owed(parts: Iterable[Owed | None]) -> Owed | None:
    """What several hooks owe; None if that is unknown for one of them."""
    found = list(parts)
    return None if None in found else [pair for part in found for pair in part or ()]


def add_owed(*parts: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The sum of what is owed, by parameter."""
    total: dict[str, Tensor] = {}
    for name, owed in itertools.chain(*parts):
        total[name] = total[name] + owed.to(total[name]) if name in total else owed
    return total


def scale_owed(saved: Any, owed: Collection[int], factor: float) -> Any:
    """A saved state with the tensors of these ids multiplied; all else is the same."""
    if isinstance(saved, Tensor):
        return saved * factor if id(saved) in owed else saved
    if isinstance(saved, Mapping):
        return {key: scale_owed(part, owed, factor) for key, part in saved.items()}
    return saved


def merge_owed(saved: Any, other: Any, owed: Collection[int]) -> Any:
    """A saved state to whose tensors those of `other` with these ids are added; in place of None, they are copied."""
    if isinstance(other, Tensor):
        mine = isinstance(saved, Tensor)
        return saved if id(other) not in owed else saved + other.to(saved) if mine else other.clone()
    if isinstance(other, Mapping) and (saved is None or isinstance(saved, Mapping)):
        merged = {key: merge_owed((saved or {}).get(key), part, owed) for key, part in other.items()}
        if saved is not None:
            return {**saved, **{key: part for key, part in merged.items() if part is not None}}
        # Numbers and text, such as which rule a parameter belongs to, belong to the tensors that are owed.
        taken = any(isinstance(part, (Tensor, Mapping)) for part in merged.values())
        plain = {key: part for key, part in other.items() if not isinstance(part, (Tensor, Mapping))}
        return {**plain, **{key: part for key, part in merged.items() if part is not None}} if taken else None
    return saved


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
    return list(attributes(value).values())


def attributes(value: Any) -> dict[str, Any]:
    """All that an object has, in a dict or in slots."""
    found = [cls.__dict__.get("__slots__", ()) for cls in type(value).__mro__]
    slots = [name for names in found for name in ([names] if isinstance(names, str) else names)]
    return getattr(value, "__dict__", {}) | {n: getattr(value, n) for n in slots if n[:2] != "__" and hasattr(value, n)}

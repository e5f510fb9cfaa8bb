"""Which parameter lies in which bucket: pure data, with a fingerprint that ranks compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.hooks.bucket import BucketSpec

_COMPILED = "_orig_mod."
"""What torch.compile puts before the names in a module."""


def plain_name(name: str) -> str:
    """The name of a parameter in the uncompiled module, so that saved states and settings by name fit the compiled one too.

    >>> plain_name("_orig_mod.blocks.0.weight"), plain_name("blocks.0._orig_mod.weight")
    ('blocks.0.weight', 'blocks.0.weight')
    """
    return name.replace(_COMPILED, "")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter as the reducer sees it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sparse: bool = False

    @classmethod
    def of(cls, name: str, parameter: Tensor, *, sparse: bool = False) -> ParameterSpec:
        """The spec of a parameter."""
        return cls(name, tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype, parameter.device, sparse)

    @property
    def nbytes(self) -> int:
        """Bytes of its gradient."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def describe(self) -> str:
        """What ranks must agree on, in words; the device's number may differ between ranks."""
        dtype = str(self.dtype).removeprefix("torch.")
        kind = " sparse" if self.sparse else ""
        return f"{self.name}: {dtype}{list(self.shape)} stride {list(self.stride)} on {self.device.type}{kind}"


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Buckets in launch order; `members[b]` are the indices of the parameters in bucket b."""

    parameters: tuple[ParameterSpec, ...]
    members: tuple[tuple[int, ...], ...]

    @classmethod
    def make(cls, parameters: Iterable[ParameterSpec], members: Iterable[Sequence[int]]) -> BucketLayout:
        """A layout from lists of parameter indices."""
        return cls(tuple(parameters), tuple(tuple(m) for m in members))

    @property
    def buckets(self) -> tuple[BucketSpec, ...]:
        """What hooks see of each bucket."""
        return tuple(self._bucket(b, members) for b, members in enumerate(self.members))

    def _bucket(self, index: int, members: Sequence[int]) -> BucketSpec:
        specs = [self.parameters[i] for i in members]
        return BucketSpec(
            index=index,
            names=tuple(s.name for s in specs),
            shapes=tuple(s.shape for s in specs),
            strides=tuple(s.stride for s in specs),
            dtype=specs[0].dtype,
            device=specs[0].device,
            sparse=specs[0].sparse,
        )

    def fingerprint(self) -> str:
        """Equal on two ranks exactly when their parameters and buckets are."""
        text = "\n".join([*(p.describe() for p in self.parameters), repr(self.members)])
        return hashlib.sha256(text.encode()).hexdigest()

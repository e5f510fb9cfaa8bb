"""Which parameter lies in which bucket: pure data."""

from __future__ import annotations

from collections import Counter, defaultdict
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
        return cls(name, tuple(parameter.shape), tuple(parameter.stride()), parameter.dtype, parameter.device, sparse)

    @property
    def nbytes(self) -> int:
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
        return cls(tuple(parameters), tuple(tuple(m) for m in members))

    @property
    def buckets(self) -> tuple[BucketSpec, ...]:
        return tuple(self._bucket(b, members) for b, members in enumerate(self.members))

    def _bucket(self, index: int, members: Sequence[int]) -> BucketSpec:
        specs = [self.parameters[i] for i in members]
        names, shapes, strides = zip(*((one.name, one.shape, one.stride) for one in specs), strict=True)
        return BucketSpec(index, names, shapes, strides, specs[0].dtype, specs[0].device, specs[0].sparse)


def by_size(
    parameters: Sequence[ParameterSpec], limits: Sequence[int], *, order: Sequence[int] | None = None
) -> list[list[int]]:
    """Fill buckets up to `limits` bytes each: the first limit for the first bucket, the last for all that follow.

    Parameters come in `order` (their own by default). Only equal dtypes and devices share a bucket; a sparse parameter has
    one of its own. A bucket is closed once it has reached its limit, so it may exceed it by one parameter, as in torch.
    With `order` given, buckets come in the order in which they fill; otherwise by their first parameter.

    >>> p = [ParameterSpec(n, (100,), (1,), torch.float32, torch.device("cpu")) for n in "abcd"]
    >>> by_size(p, [400, 800])
    [[0], [1, 2], [3]]
    """
    done: list[list[int]] = []
    filling: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    nbytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for i in range(len(parameters)) if order is None else order:
        spec = parameters[i]
        if spec.sparse:
            done.append([i])
            continue
        key = (spec.dtype, spec.device)
        filling[key].append(i)
        nbytes[key] += spec.nbytes
        if nbytes[key] >= limits[min(filled[key], len(limits) - 1)]:
            done.append(filling.pop(key))
            nbytes[key] = 0
            filled[key] += 1
    done += list(filling.values())
    return done if order is not None else sorted(done, key=min)

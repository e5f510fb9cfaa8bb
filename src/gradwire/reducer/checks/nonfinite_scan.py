"""The check of one step by a CUDA device alone: which elements of gradients and averages are not finite.

The host enqueues it and reads the result later, when the device is done with it. Meanwhile the device can use the result: an
optimizer that takes `bad` as its `found_inf` does not step where it is 1.

Note [What the device does]
A kernel looks at all averages but the last while the last bucket is reduced, and then at the last. It runs on the stream on which
the optimizer will: that has to wait for the last bucket anyway, and kernels that wait on another stream can make every kernel
launch of a step slower (see docs/design.md). Another one looks at the gradients that they were made of, which are still in
`.grad`, but only if an average is bad: it reads that from the device. Gradients that are overwritten by the averages are looked
at before the reduction, on its stream. Of each parameter, the first NaN, the first infinity and the first element beyond the
range of a narrower dtype are stored, which is all that a report needs; so gradients may be overwritten or freed before the host
reads. In a healthy step nothing is written, and nothing has to be reset for the next one.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from gradwire.hooks.bucket import BucketSpec, GradBucket, is_dense
from gradwire.reducer.checks.nonfinite_search import Found, Kind, in_order_of_backward, number_in_shape
from gradwire.runtime.jit import kernels

NONE = torch.iinfo(torch.int64).max
"""What is stored where nothing was found."""
_KERNELS = "gradwire.reducer.checks.nonfinite_kernels"
_KINDS = (Kind.NAN, Kind.INFINITE, Kind.BEYOND)
_NARROW = frozenset({torch.float16, torch.bfloat16})
_DTYPES = _NARROW | {torch.float32, torch.float64}

Stride = tuple[int, ...]
Part = list[tuple[int, int]]
"""The parameters in a tensor, one after another: of each the row in which is stored what is found, and the number of elements."""


def can_scan(dtype: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether a `Scan` can look at gradients of `dtype` that will be converted to `narrow`."""
    return dtype in _DTYPES and (narrow is dtype or (narrow in _NARROW and dtype is not torch.float64))


def has_kernels() -> bool:
    """Whether Triton is installed."""
    return kernels(_KERNELS) is not None


class Places:
    """Tensors of one dtype and the parameters in them, as the kernel reads them on the device.

    `tensors` has a row for each: elements, its first tile, its first row in `members`, and how many it has there. `members` has
    a row for each parameter: where it begins and ends in its tensor, and its row in `found`.
    """

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        """`parts`: what each tensor consists of."""
        self.dtype, self.tiles = dtype, 0
        tensors: list[tuple[int, int, int, int]] = []
        members: list[tuple[int, int, int]] = []
        tiles_of: list[int] = []
        tile = kernels(_KERNELS).TILE  # type: ignore[union-attr]
        for parameters in parts:
            begin, first = 0, len(members)
            for number, numel in parameters:
                members.append((begin, begin + numel, number))
                begin += numel
            tensors.append((begin, self.tiles, first, len(parameters)))
            tiles_of.append(-(-begin // tile))
            self.tiles += tiles_of[-1]
        self.tensors, self.members = upload(tensors, device), upload(members, device)
        of_tile = [tensor for tensor, count in enumerate(tiles_of) for _ in range(count)]
        self.tensor_of_tile = upload(of_tile, device, dtype=torch.int32)


def upload(values: Sequence[Any], device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor of these numbers on `device`, copied without waiting for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Addresses:
    """Where tensors are: their addresses, on the device."""

    def __init__(self, addresses: Sequence[int], device: torch.device) -> None:
        self.values = upload(addresses, device)
        self.aligned = not any(address % 16 for address in addresses)


At = tuple[Places, Addresses]


class Tensors:
    """Tensors that are looked at in every step. What the device needs to know of them is copied to it again only if it changes."""

    def __init__(self) -> None:
        self._specs: list[BucketSpec] = []
        self._known: tuple[Places, Addresses, list[int]] | None = None

    def at(
        self, specs: list[BucketSpec], parts: Callable[[], list[Part]], addresses: list[int], dtype: torch.dtype
    ) -> At:
        """The tensors at these addresses, 0 for one that is not there. `parts` are made of `specs`, and asked for if these are
        new."""
        known, device = self._known, specs[0].device
        same = len(specs) == len(self._specs) and all(map(is_, specs, self._specs))
        if known is None or not same or known[0].dtype is not dtype:
            self._known = known = Places(parts(), dtype, device), Addresses(addresses, device), addresses
        elif addresses != known[2]:
            self._known = known = known[0], Addresses(addresses, device), addresses
        self._specs = specs
        return known[:2]


class Scan:
    """The check of one step. Made once, and used for one step after another.

    What it enqueues is on the current stream; what has to be before a reduction, on the stream that `reductions` makes current.
    """

    def __init__(
        self,
        names: Sequence[str],
        device: torch.device,
        reductions: Callable[[], contextlib.AbstractContextManager[object]],
    ) -> None:
        self._reductions = reductions
        self._number = {name: number for number, name in enumerate(names)}
        self._kernels: Any = kernels(_KERNELS)
        self._found = torch.full((2, len(names), len(_KINDS)), NONE, dtype=torch.int64, device=device)
        self._flags = torch.zeros(2, device=device)
        self._in_gradients, self.bad = self._flags
        """1 on the device if an average is not finite, else 0. It stays until the next `begin`."""
        self._on_host = torch.zeros(2, pin_memory=device.type == "cuda")
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._tensors: defaultdict[object, Tensors] = defaultdict(Tensors)
        self._gradients: list[BucketSpec] = []
        self._strides: dict[int, Sequence[Stride]] = {}
        """Of gradients that were looked at in `.grad`, by the `id` of their bucket's spec."""
        self._dense: dict[int, tuple[BucketSpec, bool]] = {}
        """Of each bucket, whether parameters fill their memory."""
        self._averages: list[tuple[BucketSpec, Tensor]] = []
        self._looked_at = 0
        """How many of them have been looked at."""
        self._of_averages: list[BucketSpec] = []
        """Of all that were, once they are not kept any more."""
        self._kept: list[GradBucket] = []
        self._copies: list[Tensor] = []
        """Of gradients that do not fill their memory, until the kernel is enqueued that reads them."""
        self.dirty = False
        """Whether something may be stored that was not there at the beginning."""

    def rehearse(self, dtypes: Iterable[torch.dtype]) -> None:
        """Run the kernels once, on nothing: raises if they cannot be compiled here."""
        device = self._flags.device
        for dtype in dtypes:
            at = Places([[(0, 1)]], dtype, device), Addresses([0], device)
            self._detect(at, self.bad, math.inf)
            self._find(at, self.bad, math.inf)

    def begin(self) -> None:
        """A step begins: forget the last one."""
        if self.dirty:
            self._found.fill_(NONE)
            self._flags.zero_()
        self.dirty = True
        self._gradients, self._averages, self._kept = [], [], []
        self._looked_at, self._of_averages = 0, []
        self._strides.clear()

    def keep(self, bucket: GradBucket) -> None:
        """The gradients of a bucket stay in `.grad` until `enqueue`."""
        self._gradients.append(bucket.spec)
        self._kept.append(bucket)

    def look_at_gradients(self, bucket: GradBucket, narrow: torch.dtype | None) -> None:
        """Look at the gradients of a bucket, which will be overwritten."""
        spec, buffer = bucket.spec, bucket.buffer()
        self._gradients.append(spec)
        if not spec.numel:
            return
        with self._reductions():
            at = self._tensors[spec.index].at([spec], lambda: [self._part(spec, 0)], [buffer.data_ptr()], buffer.dtype)
            self._detect(at, self._in_gradients, limit(narrow))
            self._find(at, self._in_gradients, limit(narrow))

    def add_average(self, spec: BucketSpec, result: Tensor) -> None:
        """An average that is to be looked at."""
        if not _can_read(result):
            result = result.detach().float().contiguous()
        self._averages.append((spec, result))

    def look_at_averages(self) -> None:
        """Look at those that were added since the last call."""
        first, self._looked_at = self._looked_at, len(self._averages)
        for dtype, (specs, addresses) in _by_dtype(self._averages[first:]).items():
            parts = functools.partial(self._parts, specs, [])
            at = self._tensors["averages", bool(first), dtype].at(specs, parts, addresses, dtype)
            self._detect(at, self.bad, math.inf)

    def enqueue(self, narrow: Callable[[torch.dtype], torch.dtype | None]) -> None:
        """Look at all averages, and at gradients if one is bad, and have the result copied to the host."""
        self.look_at_averages()
        averages = _by_dtype(self._averages)
        for dtype in {**averages, **dict.fromkeys(bucket.spec.dtype for bucket in self._kept if bucket.spec.numel)}:
            specs, addresses = averages.get(dtype, ([], []))
            kept = [bucket for bucket in self._kept if bucket.spec.dtype is dtype]
            in_grads = [bucket.spec for bucket in kept]
            parts = functools.partial(self._parts, specs, in_grads)
            addresses = addresses + [address for bucket in kept for address in self._addresses(bucket)]
            at = self._tensors["all", dtype].at([*specs, *in_grads], parts, addresses, dtype)
            self._find(at, self.bad, limit(narrow(dtype)))
        self._of_averages = [spec for spec, _ in self._averages]
        self._averages, self._kept, self._copies = [], [], []  # memory that may be released
        self._on_host.copy_(self._flags, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._flags.device))

    def _parts(self, averages: list[BucketSpec], kept: list[BucketSpec]) -> list[Part]:
        """The parameters in the averages of some buckets, and in the gradients of some."""
        singles = [[one] for spec in kept for one in self._part(spec, 0)]
        return [self._part(spec, len(self._number)) for spec in averages] + singles

    def _part(self, spec: BucketSpec, offset: int) -> Part:
        """The parameters of a bucket, with rows in `found` that begin at `offset`."""
        return [(offset + self._number[name], numel) for name, numel in zip(spec.names, spec.numels, strict=True)]

    def _addresses(self, bucket: GradBucket) -> list[int]:
        """Where the gradients of a bucket's parameters are."""
        spec = bucket.spec
        gradients = [p.grad for p in bucket.parameters()]
        strides = tuple([spec.strides[k] if g is None else g.stride() for k, g in enumerate(gradients)])
        other_dtype = any(g is not None and g.dtype is not spec.dtype for g in gradients)
        if other_dtype or strides != spec.strides or not self._is_dense(spec):
            for k, g in enumerate(gradients):
                if g is not None and (g.dtype is not spec.dtype or not is_dense(g.shape, strides[k])):
                    gradients[k] = g.detach().to(spec.dtype).contiguous()
            self._copies += [g for g in gradients if g is not None]
            strides = tuple([spec.strides[k] if g is None else g.stride() for k, g in enumerate(gradients)])
        self._strides[id(spec)] = strides
        return [0 if g is None else g.data_ptr() for g in gradients]

    def _is_dense(self, spec: BucketSpec) -> bool:
        known = self._dense.get(spec.index)
        if known is None or known[0] is not spec:
            known = self._dense[spec.index] = spec, all(map(is_dense, spec.shapes, spec.strides))
        return known[1]

    def _detect(self, at: At, flag: Tensor, least: float) -> None:
        places, addresses = at
        self._kernels.detect(places, addresses.values, flag, aligned=addresses.aligned, limit=least)

    def _find(self, at: At, flag: Tensor, least: float) -> None:
        places, addresses = at
        self._kernels.find(places, addresses.values, flag, self._found, limit=least)

    def wait(self) -> bool:
        """Whether an average was not finite. Waits until the device has looked at all."""
        if self._event is not None:
            self._event.synchronize()
        gradients, averages = self._on_host.tolist()
        self.dirty = bool(gradients or averages)
        return bool(averages)

    def found(self) -> tuple[list[Found], list[Found]]:
        """What is not finite in the gradients, in the order of backward, and in the averages."""
        gradients, averages = self._found.tolist()
        of_gradients = [(spec, self._strides.get(id(spec), spec.strides)) for spec in self._gradients]
        of_averages = [(spec, spec.strides) for spec in self._of_averages]
        return (
            self._named(of_gradients, gradients, (_KINDS[:2], _KINDS[2:])),
            self._named(of_averages, averages, (_KINDS[:2],)),
        )

    def _named(
        self,
        buckets: Sequence[tuple[BucketSpec, Sequence[Stride]]],
        found: list[list[int]],
        kinds: Sequence[Sequence[Kind]],
    ) -> list[Found]:
        """Of each bucket, what is of the first kinds; if nothing is, of the next."""
        result: list[Found] = []
        for spec, strides in buckets:
            of_bucket = (self._of_bucket(spec, strides, found, some) for some in kinds)
            result += next(filter(None, of_bucket), [])
        return result

    def _of_bucket(
        self, spec: BucketSpec, strides: Sequence[Stride], found: list[list[int]], kinds: Sequence[Kind]
    ) -> list[Found]:
        result: list[Found] = []
        members = list(zip(spec.names, spec.shapes, strides, strict=True))
        for name, shape, stride in in_order_of_backward(members, self._number):
            number = self._number[name]
            place, kind = min((found[number][_KINDS.index(kind)], kind) for kind in kinds)
            if place != NONE:
                result.append(Found(kind, number, number_in_shape(place, shape, stride)))
        return result


def _can_read(result: Tensor) -> bool:
    return result.dtype in _DTYPES and result.is_contiguous()


def _by_dtype(
    averages: Sequence[tuple[BucketSpec, Tensor]],
) -> dict[torch.dtype, tuple[list[BucketSpec], list[int]]]:
    """Those that have elements, and their addresses."""
    rows: defaultdict[torch.dtype, tuple[list[BucketSpec], list[int]]] = defaultdict(lambda: ([], []))
    for spec, result in averages:
        if spec.numel:
            specs, addresses = rows[result.dtype]
            specs.append(spec)
            addresses.append(result.data_ptr())
    return rows


def limit(narrow: torch.dtype | None) -> float:
    """The least absolute value that is infinite in `narrow`, where it is rounded to nearest; infinity without one.

    >>> limit(torch.float16), limit(None)
    (65520.0, inf)
    """
    if narrow is None:
        return math.inf
    info = torch.finfo(narrow)
    return info.max * (2 - info.eps / 2) / (2 - info.eps)

"""Decoupled momentum (DeMo, arXiv 2411.19870): each rank keeps its own momentum and sends only its fast components.

The momentum is split into chunks (squares of matrices, ranges of vectors) of almost equal size, a cosine transform gives the
frequencies of each, and the k largest of each chunk are sent and subtracted from the momentum. The rest is sent later. A frequency
that only some ranks sent is divided by the number of all ranks, so that `value` is the mean of `sent`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from gradwire.errors import UsageError
from gradwire.hooks.arguments import checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn, always_alike
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.compressors.sparse import VALUES, Format, Pairs, SendsPairs, gather
from gradwire.hooks.numerics.elementwise import drop_nonfinite_, wide
from gradwire.hooks.state import Owed, join_flat, split_flat


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of a parameter: a matrix of `rows` x `columns` in tiles of `height` x `width`. A vector is one row."""

    rows: int
    columns: int
    height: int
    width: int
    k: int
    """Frequencies sent per tile."""

    @staticmethod
    def of(shape: tuple[int, ...], chunk: int, k: int) -> Tiling:
        """The tiling of a parameter of this shape; more than two dimensions are a matrix of the first by the rest."""
        numel = math.prod(shape)
        rows = shape[0] if len(shape) > 1 and numel else 1
        columns = numel // rows
        height, width = _chunk(rows, chunk), _chunk(columns, chunk)
        return Tiling(rows, columns, height, width, min(k, height * width))

    @property
    def across(self) -> tuple[int, int]:
        return -(-self.rows // self.height), -(-self.columns // self.width)

    @property
    def tiles(self) -> int:
        return math.prod(self.across)

    def cut(self, matrix: Tensor) -> Tensor:
        down, right = self.across
        missing = (0, right * self.width - self.columns, 0, down * self.height - self.rows)
        if any(missing):
            matrix = pad(matrix, missing)
        return (
            matrix.view(down, self.height, right, self.width)
            .transpose(1, 2)
            .reshape(self.tiles, self.height, self.width)
        )

    def join(self, tiles: Tensor) -> Tensor:
        down, right = self.across
        matrix = tiles.view(down, right, self.height, self.width).transpose(1, 2)
        return matrix.reshape(down * self.height, right * self.width)[: self.rows, : self.columns]


def _chunk(length: int, chunk: int) -> int:
    return -(-length // -(-length // chunk)) if length else 1


@functools.cache
def cosines(length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The orthonormal DCT-II as a matrix, of which row i is the cosine of frequency i; and its inverse."""
    index = torch.arange(length, dtype=torch.float64, device="cpu")
    basis = torch.cos(math.pi / length * (index + 0.5) * index.view(-1, 1)) * math.sqrt(2 / length)
    basis[0] *= math.sqrt(0.5)
    # Copied from the host, which waits: it is used on other streams than the first.
    return basis.to(device, dtype), basis.T.contiguous().to(device, dtype)


def turned(tiles: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Each tile X as first X^T second^T: a transform along both dimensions, by two large products instead of many small ones. The
    result is transposed; applying the inverse transform transposes it back."""
    count, height, width = tiles.shape
    half = linear(tiles.reshape(count * height, width), first).view(count, height, width).transpose(1, 2)
    return linear(half.reshape(count * width, height), second).view(count, width, height)


@dataclass(frozen=True, slots=True, repr=False)
class DecoupledMomentum(SendsPairs):
    decay: float
    chunk: int
    k: int
    values: torch.dtype | None

    made_by = "decoupled_momentum"
    collectives = 1
    capture_key = always_alike
    traits = Trait.REMEMBERS | Trait.MOMENTUM
    real_only = "the sign of their momentum, which the optimizer uses, is not defined"

    def init(self, spec: BucketSpec) -> Tensor:
        return self.load({}, spec)

    def reduce(self, grad: Tensor, state: Tensor, turn: Turn) -> Reduction:
        """Accumulate, extract the fast frequencies, gather them, transform their mean back."""
        tilings, form = self._tilings(turn.spec), self.form(turn.spec)
        momentum = state.mul_(self.decay).add_(grad)
        views = zip(turn.spec.views(momentum), tilings, strict=True)
        chosen = _joined([_fastest(view.reshape(t.rows, t.columns), t, form) for view, t in views])
        own = _averaged([chosen], momentum, turn.spec, tilings, 1)
        drop_nonfinite_(momentum.sub_(own))
        lists = yield from gather(chosen, form, turn)
        value = _averaged(lists, momentum, turn.spec, tilings, turn.counted)
        return Reduced(value.to(grad.dtype), own.to(grad.dtype))

    def _tilings(self, spec: BucketSpec) -> list[Tiling]:
        return [Tiling.of(shape, self.chunk, self.k) for shape in spec.shapes]

    def form(self, spec: BucketSpec) -> Format:
        indices = torch.int16 if self.chunk**2 <= torch.iinfo(torch.int16).max else torch.int32
        if spec.dtype == torch.float16:  # a frequency may be `chunk` times as large as the elements
            return Format(self.values or torch.float32, indices)
        return Format(min(self.values or spec.dtype, spec.dtype, key=lambda dtype: dtype.itemsize), indices)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        pairs = sum(t.tiles * t.k for t in self._tilings(spec))
        return (world_size - 1) * pairs * self.form(spec).nbytes

    def error(self, spec: BucketSpec) -> float:
        return max(16 * torch.finfo(spec.dtype).eps, 64 * torch.finfo(wide(spec.dtype)).eps)

    def save(self, state: Tensor, spec: BucketSpec) -> dict[str, Any]:
        return split_flat(state, spec)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Tensor:
        return join_flat(saved, spec, dtype=wide(spec.dtype))

    def owed(self, saved: Mapping[str, Any]) -> Owed:
        """The momentum, most of which is still to be sent."""
        return list(saved.items())


def _fastest(matrix: Tensor, tiling: Tiling, form: Format) -> Pairs:
    width, height = (cosines(length, matrix.dtype, matrix.device)[0] for length in (tiling.width, tiling.height))
    frequencies = turned(tiling.cut(matrix), width, height).reshape(tiling.tiles, tiling.height * tiling.width)
    indices = torch.topk(frequencies.abs(), tiling.k, sorted=False).indices
    return Pairs(indices.to(form.indices), frequencies.gather(1, indices).to(form.values))


def _joined(lists: list[Pairs]) -> Pairs:
    return Pairs(*(torch.cat([each.reshape(-1) for each in both]) for both in zip(*lists, strict=True)))


def _averaged(lists: list[Pairs], like: Tensor, spec: BucketSpec, tilings: list[Tiling], divisor: int) -> Tensor:
    """The inverse transform of the mean of what the ranks sent."""
    flat = torch.zeros_like(like)
    sizes = [t.tiles * t.k for t in tilings]
    parts = [zip(indices.split(sizes), values.split(sizes), strict=True) for indices, values in lists]
    for tiling, view, *ranks in zip(tilings, spec.views(flat), *parts, strict=True):
        frequencies = flat.new_zeros(tiling.tiles, tiling.height * tiling.width)
        for indices, values in ranks:  # in rank order, and no index twice in a list: the same bits everywhere
            shape = (tiling.tiles, tiling.k)
            frequencies.scatter_add_(1, indices.view(shape).long(), values.view(shape).to(flat.dtype).div_(divisor))
        height, width = (cosines(length, flat.dtype, flat.device)[1] for length in (tiling.height, tiling.width))
        tiles = turned(frequencies.view(tiling.tiles, tiling.width, tiling.height), height, width)
        view.copy_(tiling.join(tiles).reshape(view.shape))
    return flat


@checks_arguments(decay="[0, 1)", chunk="[1, inf)", k="[1, inf)", values=VALUES)
def decoupled_momentum(
    *, decay: float = 0.999, chunk: int = 64, k: int = 32, values: torch.dtype | None = None
) -> CommHook:
    """Decoupled momentum: send the `k` largest frequencies of each chunk of this rank's momentum. (DeMo, arXiv 2411.19870)

    Each rank adds its gradients to its own momentum. Matrices are split into squares of `chunk` x `chunk`, vectors into ranges of
    `chunk`; parameters of more dimensions are matrices of the first by the rest. Use `optim.SignSGD` as the optimizer. `values` is
    the dtype in which frequencies are sent (of float16 gradients: float32); the rounding stays in the momentum. Non-finite values
    are sent once and not kept.

    On the wire: (n - 1) times the number of chunks times k (2 + itemsize(values)) bytes for n ranks; 4 + itemsize(values) if chunk
    is above 181. Memory: the momentum, as large as the bucket, in float32 for 16-bit gradients; during a reduction, two more.
    """
    if k > chunk**2:
        raise UsageError(
            f"decoupled_momentum(chunk={chunk}, k={k}): a chunk has only {chunk**2} frequencies. Pass a smaller k or larger chunk."
        )
    return DecoupledMomentum(decay, chunk, k, values)

"""Decoupled momentum (DeMo, arXiv 2411.19870): each rank keeps its own momentum and sends only its fast components.

The momentum is split into chunks (squares of matrices, ranges of vectors), a cosine transform gives the frequencies of each, and
the k largest of each chunk are sent and subtracted from the momentum. The rest is sent later, as with error feedback.

A length that is not a multiple of the chunk is split into chunks of almost equal size, at most the requested one, and padded with
zeros. A frequency that only some ranks sent is divided by the number of all ranks, so that `value` is the mean of `sent`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from gradwire.collectives import all_gather_into_tensor
from gradwire.errors import UsageError
from gradwire.hooks.arguments import checks_numbers
from gradwire.hooks.base import CommHook, Reduced, Reduction, Trait, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.compressors.sparse import ALONE, Format, Pairs, check_values, value_dtype
from gradwire.hooks.numerics.elementwise import drop_nonfinite_, wide
from gradwire.hooks.state import join_flat, split_flat


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
        """The number of tiles along rows and along columns."""
        return -(-self.rows // self.height), -(-self.columns // self.width)

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return math.prod(self.across)

    def cut(self, matrix: Tensor) -> Tensor:
        """The tiles of a matrix: [tiles, height, width]."""
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
        """The matrix with these tiles: the inverse of `cut`."""
        down, right = self.across
        matrix = tiles.view(down, right, self.height, self.width).transpose(1, 2)
        return matrix.reshape(down * self.height, right * self.width)[: self.rows, : self.columns]


def _chunk(length: int, chunk: int) -> int:
    """The size of almost equal chunks of at most `chunk`."""
    return -(-length // -(-length // chunk)) if length else 1


def cosines(length: int, like: Tensor) -> Tensor:
    """The orthonormal DCT-II as a matrix: row i is the cosine of frequency i."""
    index = torch.arange(length, dtype=torch.float64, device="cpu")
    basis = torch.cos(math.pi / length * (index + 0.5) * index.view(-1, 1)) * math.sqrt(2 / length)
    basis[0] *= math.sqrt(0.5)
    return basis.to(like)


def turned(tiles: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Each tile X as first X^T second^T: a transform along both dimensions, by two large products instead of many small ones.

    The result is transposed; applying the inverse transform transposes it back.
    """
    count, height, width = tiles.shape
    half = linear(tiles.reshape(count * height, width), first).view(count, height, width).transpose(1, 2)
    return linear(half.reshape(count * width, height), second).view(count, width, height)


@dataclass(slots=True)
class _Momentum:
    flat: Tensor
    cosines: dict[int, tuple[Tensor, Tensor]]
    """The transform and its inverse by length. Not saved, because they can be recomputed."""

    def there(self, length: int) -> Tensor:
        """The transform to frequencies."""
        if length not in self.cosines:
            basis = cosines(length, self.flat)
            self.cosines[length] = (basis, basis.T.contiguous())
        return self.cosines[length][0]

    def back(self, length: int) -> Tensor:
        """The inverse transform; `there` has computed it."""
        return self.cosines[length][1]


@dataclass(frozen=True, slots=True)
class DecoupledMomentum(CommHook):
    """The hook of `decoupled_momentum`."""

    decay: float
    chunk: int
    k: int
    values: torch.dtype | None

    collectives = 1
    dense_only = True
    traits = Trait.REMEMBERS
    alone = ALONE

    def check(self, spec: BucketSpec) -> None:
        CommHook.check(self, spec)
        if spec.dtype.is_complex:
            raise UsageError(
                f"{self!r} on {spec}: its gradients are complex, and the sign of their momentum, which the optimizer uses, is not "
                'defined. Give such parameters mean(), by partition({"name.*": mean(), "*": ...}).'
            )

    def init(self, spec: BucketSpec) -> Any:
        return self.load({}, spec)

    def reduce(self, grad: Tensor, state: _Momentum, turn: Turn) -> Reduction:
        """Accumulate, extract the fast frequencies, gather them, transform their mean back."""
        self.check(turn.spec)
        self.refuse_sparse(grad, turn.spec)
        tilings, form = self._tilings(turn.spec), self._format(turn.spec)
        state.flat.mul_(self.decay).add_(grad)
        chosen = [self._fastest(m, t, state, form) for m, t in self._matrices(state.flat, turn.spec, tilings)]
        own = torch.zeros_like(state.flat)
        self._write(own, [(pairs,) for pairs in chosen], state, turn.spec, tilings, 1)
        drop_nonfinite_(state.flat.sub_(own))

        packed = form.pack(Pairs(_row([c.indices for c in chosen]), _row([c.values for c in chosen])))
        gathered = packed.new_empty(turn.world_size * packed.numel())
        yield all_gather_into_tensor(gathered, packed, label=f"bucket {turn.spec.index}")

        ranks = [form.unpack(row) for row in gathered.view(turn.world_size, packed.numel())]
        sizes = [t.tiles * t.k for t in tilings]
        lists = zip(*(_split(pairs, sizes) for pairs in ranks), strict=True)
        value = torch.zeros_like(state.flat)
        self._write(value, list(lists), state, turn.spec, tilings, turn.counted)
        return Reduced(value.to(grad.dtype), own.to(grad.dtype))

    def _fastest(self, matrix: Tensor, tiling: Tiling, state: _Momentum, form: Format) -> Pairs:
        """The k largest frequencies of each tile, and their indices in it."""
        frequencies = turned(tiling.cut(matrix), state.there(tiling.width), state.there(tiling.height))
        frequencies = frequencies.reshape(tiling.tiles, tiling.height * tiling.width)
        indices = torch.topk(frequencies.abs(), tiling.k, sorted=False).indices
        return Pairs(indices.to(form.indices), frequencies.gather(1, indices).to(form.values))

    def _write(
        self,
        flat: Tensor,
        lists: list[tuple[Pairs, ...]],
        state: _Momentum,
        spec: BucketSpec,
        tilings: list[Tiling],
        divisor: int,
    ) -> None:
        """Write the inverse transform of the mean of what the ranks sent to each parameter's place in `flat`."""
        for ranks, tiling, view in zip(lists, tilings, spec.views(flat), strict=True):
            frequencies = flat.new_zeros(tiling.tiles, tiling.height * tiling.width)
            for indices, values in ranks:  # in rank order, and no index twice in a list: the same bits everywhere
                shape = (tiling.tiles, tiling.k)
                frequencies.scatter_add_(1, indices.view(shape).long(), values.view(shape).to(flat.dtype).div_(divisor))
            tiles = frequencies.view(tiling.tiles, tiling.width, tiling.height)
            tiles = turned(tiles, state.back(tiling.height), state.back(tiling.width))
            view.copy_(tiling.join(tiles).reshape(view.shape))

    def _matrices(self, flat: Tensor, spec: BucketSpec, tilings: list[Tiling]) -> list[tuple[Tensor, Tiling]]:
        return [(v.reshape(t.rows, t.columns), t) for v, t in zip(spec.views(flat), tilings, strict=True)]

    def _tilings(self, spec: BucketSpec) -> list[Tiling]:
        return [Tiling.of(shape, self.chunk, self.k) for shape in spec.shapes]

    def _format(self, spec: BucketSpec) -> Format:
        indices = torch.int16 if self.chunk**2 <= torch.iinfo(torch.int16).max else torch.int32
        if spec.dtype == torch.float16:  # a frequency may be `chunk` times as large as the elements
            return Format(self.values or torch.float32, indices)
        return Format(value_dtype(spec, self.values), indices)

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        pairs = sum(t.tiles * t.k for t in self._tilings(spec))
        return (world_size - 1) * pairs * self._format(spec).nbytes

    def error(self, spec: BucketSpec) -> float:
        """Rounding, accumulated by the transform of many elements."""
        return max(16 * torch.finfo(spec.dtype).eps, 64 * torch.finfo(wide(spec.dtype)).eps)

    def save(self, state: _Momentum, spec: BucketSpec) -> dict[str, Any]:
        return split_flat(state.flat, spec)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> Any:
        return _Momentum(join_flat(saved, spec, dtype=wide(spec.dtype)), {})

    def __repr__(self) -> str:
        return f"decoupled_momentum(decay={self.decay}, chunk={self.chunk}, k={self.k}, values={self.values})"


def _row(parts: list[Tensor]) -> Tensor:
    return torch.cat([p.reshape(-1) for p in parts])


def _split(pairs: Pairs, sizes: list[int]) -> list[Pairs]:
    return [Pairs(*both) for both in zip(pairs.indices.split(sizes), pairs.values.split(sizes), strict=True)]


@checks_numbers
def decoupled_momentum(
    *, decay: float = 0.999, chunk: int = 64, k: int = 32, values: torch.dtype | None = None
) -> CommHook:
    """Decoupled momentum: send the `k` largest frequencies of each chunk of this rank's momentum. (DeMo, arXiv 2411.19870)

    Each rank adds its gradients to its own momentum, which is never synchronized. Matrices are split into squares of `chunk` x
    `chunk`, vectors into ranges of `chunk`; parameters of more dimensions are matrices of the first by the rest. Use
    `optim.SignSGD` as the optimizer. `values`, such as torch.bfloat16, is the dtype in which frequencies are sent; the rounding
    stays in the momentum. By default those of float16 gradients are sent as float32. Non-finite values are sent once and not kept.

    On the wire: (n - 1) times the number of chunks times k (2 + itemsize(values)) bytes for n ranks; 4 + itemsize(values) if
    chunk is above 181. Memory: the momentum, as large as the bucket, in float32 for 16-bit gradients; during a reduction, two
    more.
    """
    what = f"decoupled_momentum(decay={decay}, chunk={chunk}, k={k})"
    if not 0 <= decay < 1:
        raise UsageError(f"{what}: decay must be at least 0 and below 1, or the momentum grows without bound.")
    if chunk < 1 or k < 1:
        raise UsageError(f"{what}: chunk and k count elements. Pass 1 or more.")
    if k > chunk**2:
        raise UsageError(f"{what}: a chunk has only {chunk**2} frequencies. Pass a smaller k, or a larger chunk.")
    check_values(what, values)
    return DecoupledMomentum(decay, chunk, k, values)

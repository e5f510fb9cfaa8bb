"""Sparse hooks: each rank sends its most important elements, and their indices.

Different ranks choose different elements, so an all-reduce cannot add them: the lists are gathered, and every rank adds all of
them in rank order. What was not sent is lost unless error feedback keeps it; `dgc`, in a module of its own, keeps it itself,
and `random_k`, where all ranks choose the same elements, is a stage.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collectives import all_gather, all_gather_into_tensor
from gradwire.collectives.lower import as_bytes
from gradwire.errors import UsageError
from gradwire.hooks.arguments import checks_numbers
from gradwire.hooks.base import CommHook, Reduced, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.numerics.elementwise import as_dtype, count, number_dtype, real
from gradwire.hooks.numerics.select import largest, reaching

ALONE = (
    "it gathers lists of indices and values, because each rank sends other elements, and an all-reduce needs every element of "
    "every rank"
)
"""Why a sparse hook cannot be a stage."""


class Pairs(NamedTuple):
    """Some elements of a row: their indices and their values."""

    indices: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Format:
    """The packing of pairs: all values, then all indices, without padding."""

    values: torch.dtype
    indices: torch.dtype = torch.int32

    @property
    def nbytes(self) -> int:
        """The bytes of one pair."""
        return self.values.itemsize + self.indices.itemsize

    def pack(self, pairs: Pairs) -> Tensor:
        """Pairs as bytes; both lists must have the format's dtypes."""
        return torch.cat([as_bytes(pairs.values.contiguous()), as_bytes(pairs.indices.contiguous())])

    def unpack(self, packed: Tensor) -> Pairs:
        """The pairs in a row of bytes, which may begin anywhere in memory."""
        cut = packed.numel() // self.nbytes * self.values.itemsize
        # Copies, because a view in a wider dtype must be aligned to its size.
        return Pairs(packed[cut:].clone().view(self.indices), packed[:cut].clone().view(self.values))

    def check(self, numel: int, what: object) -> None:
        if numel > torch.iinfo(self.indices).max:
            raise UsageError(
                f"{what!r} on a bucket of {numel} elements: indices are sent as {self.indices}, which is too narrow. Until the "
                "first step has shown the order of gradients all parameters are one bucket: pass Buckets(from_start=True) to "
                "replicate(), whose limit then holds from the start, or give a parameter as large as this mean() by partition()."
            )


def share_of(numel: int, *, ratio: float | None = None, k: int | None = None) -> int:
    """How many of `numel` elements are chosen: at least one, at most all."""
    wanted = math.ceil(ratio * numel) if ratio is not None else (k or 0)
    return min(numel, max(1, wanted))


def check_ratio(what: str, ratio: float) -> None:
    """Raise unless 0 < `ratio` <= 1."""
    if not 0 < ratio <= 1:
        raise UsageError(
            f"{what}: ratio {ratio} is not a part of the whole. Pass more than 0 and at most 1, such as 0.01."
        )


def check_values(what: str, values: torch.dtype | None) -> None:
    """Raise unless values can be sent in this dtype."""
    if values not in (None, torch.float32, torch.bfloat16):
        raise UsageError(
            f"{what}: values={values} is not a dtype that values can be sent in. Pass torch.bfloat16, torch.float32, or None "
            "for the gradient's own."
        )


def exchange(chosen: Pairs, form: Format, turn: Turn) -> Reduction:
    """Gather lists of equal length from all ranks: their mean is `value`, this rank's own list is `sent`."""
    packed = form.pack(chosen)
    gathered = packed.new_empty(turn.world_size * packed.numel())
    yield all_gather_into_tensor(gathered, packed, label=f"bucket {turn.spec.index}")
    lists = [form.unpack(row) for row in gathered.view(turn.world_size, packed.numel())]
    return _rows(lists, chosen, turn)


def _rows(lists: list[Pairs], chosen: Pairs, turn: Turn) -> Reduced:
    """The mean of the lists, added in rank order; no list has an index twice. So every rank computes the same bits."""
    dtype, number = turn.spec.dtype, number_dtype(turn.spec.dtype)
    value = torch.zeros(count(turn.spec), dtype=number, device=chosen.values.device)
    for indices, values in lists:
        value.index_add_(0, indices, values.to(number).div_(turn.counted))
    sent = value  # not needed if donated
    if not turn.donated:
        sent = torch.zeros_like(value).index_copy_(0, chosen.indices.long(), chosen.values.to(number))
    return Reduced(as_dtype(value, dtype), as_dtype(sent, dtype))


def value_dtype(spec: BucketSpec, values: torch.dtype | None) -> torch.dtype:
    """The dtype in which a bucket's values are sent."""
    own = spec.dtype.to_real()
    return values if values is not None and values.itemsize < own.itemsize else own


def check_bucket(hook: CommHook, spec: BucketSpec, values: torch.dtype | None) -> None:
    """Raise unless the bucket is dense and its indices fit their dtype: for `check`."""
    CommHook.check(hook, spec)
    Format(value_dtype(spec, values)).check(count(spec), hook)


class _Selecting(CommHook):
    """A hook that sends the elements that this rank chooses."""

    values: torch.dtype | None
    alone = ALONE
    dense_only = True

    @abstractmethod
    def choose(self, flat: Tensor) -> Tensor:
        """The indices of the elements to send."""

    def check(self, spec: BucketSpec) -> None:
        check_bucket(self, spec, self.values)

    def chosen(self, grad: Tensor, turn: Turn) -> tuple[Pairs, Format]:
        """The chosen elements as they are sent."""
        self.refuse_sparse(grad, turn.spec)
        flat = real(grad)
        form = Format(value_dtype(turn.spec, self.values))
        form.check(flat.numel(), self)
        indices = self.choose(flat)
        return Pairs(indices.to(form.indices), flat[indices].to(form.values)), form


@dataclass(frozen=True, slots=True)
class TopK(_Selecting):
    """The hook of `top_k`: a fixed number of elements, one all-gather."""

    ratio: float | None
    k: int | None
    values: torch.dtype | None

    collectives = 1

    def choose(self, flat: Tensor) -> Tensor:
        return largest(flat, share_of(flat.numel(), ratio=self.ratio, k=self.k))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        return (yield from exchange(*self.chosen(grad, turn), turn))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        k = share_of(count(spec), ratio=self.ratio, k=self.k)
        return (world_size - 1) * k * Format(value_dtype(spec, self.values)).nbytes

    def __repr__(self) -> str:
        amount = f"ratio={self.ratio}" if self.ratio is not None else f"k={self.k}"
        return f"top_k({amount}, values={self.values})"


@checks_numbers
def top_k(*, ratio: float | None = None, k: int | None = None, values: torch.dtype | None = None) -> CommHook:
    """Send the elements of largest magnitude: `k` of each bucket, or the `ratio`-th part of it. (arXiv 1704.05021, 1809.07599)

    Each rank chooses its own; all lists are gathered and added in rank order. Exactly k are chosen, rounded up and at least
    one; ties go to the lower index. What is left out is lost, so put `error_feedback()` around it. `values`, such as
    torch.bfloat16, is the dtype in which the elements are sent.

    On the wire: (n - 1) k (4 + itemsize(values)) bytes, n being the ranks: it grows with n, where an all-reduce does not. It pays
    while n * ratio is well below 1. Memory: the lists of all ranks.

    >>> from gradwire.testing import simulate
    >>> done = simulate(top_k(k=1), [torch.tensor([5.0, 1.0]), torch.tensor([2.0, -3.0])])
    >>> done.reduced[0].value
    tensor([ 2.5000, -1.5000])
    """
    what = f"top_k(ratio={ratio}, k={k})"
    if (ratio is None) == (k is None):
        raise UsageError(f"{what}: how many elements? Pass one of ratio and k.")
    if ratio is not None:
        check_ratio(what, ratio)
    if k is not None and k < 1:
        raise UsageError(f"{what}: no element would be sent. Pass a k of at least 1.")
    check_values(what, values)
    return TopK(ratio, k, values)


@dataclass(frozen=True, slots=True)
class Threshold(_Selecting):
    """The hook of `threshold`: a varying number of elements, so the lengths are gathered before the lists."""

    value: float | None
    relative: float | None
    values: torch.dtype | None

    collectives = 2

    def choose(self, flat: Tensor) -> Tensor:
        if self.relative is None:
            return reaching(flat, flat.new_tensor(self.value))
        low, high = flat.aminmax() if flat.numel() else (flat.new_zeros(()), flat.new_zeros(()))
        return reaching(flat, torch.maximum(-low, high) * self.relative)

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        chosen, form = self.chosen(grad, turn)
        packed = form.pack(chosen)
        counts = torch.empty(turn.world_size, dtype=torch.int64, device=grad.device)
        label = f"bucket {turn.spec.index}"
        yield all_gather_into_tensor(counts, counts.new_tensor([packed.numel()]), label=f"{label}, lengths")
        gathered = [packed.new_empty(length) for length in counts.tolist()]
        yield all_gather(gathered, packed, label=label)
        return _rows([form.unpack(row) for row in gathered], chosen, turn)

    def __repr__(self) -> str:
        bound = f"value={self.value}" if self.value is not None else f"relative={self.relative}"
        return f"threshold({bound}, values={self.values})"


@checks_numbers
def threshold(
    *, value: float | None = None, relative: float | None = None, values: torch.dtype | None = None
) -> CommHook:
    """Send the elements whose magnitude is at least `value`, or `relative` times the largest of the bucket. (Strom 2015)

    Their number depends on the gradients and differs between ranks, so the lengths are gathered first, and then the lists. It
    adapts where a fixed k does not: a step with small gradients costs little. Zeros are never sent. What is left out is lost,
    so put `error_feedback()` around it. `values` is the dtype in which the elements are sent.

    On the wire: (n - 1) (8 + k (4 + itemsize(values))) bytes for n ranks and k chosen elements. On CUDA the host waits for the
    lengths: memory for the lists cannot be allocated without them.

    >>> from gradwire.testing import simulate
    >>> done = simulate(threshold(value=2.0), [torch.tensor([5.0, 1.0]), torch.tensor([2.0, -3.0])])
    >>> done.reduced[0].value
    tensor([ 3.5000, -1.5000])
    """
    what = f"threshold(value={value}, relative={relative})"
    if (value is None) == (relative is None):
        raise UsageError(f"{what}: which elements? Pass one of value and relative.")
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{what}: value must be above 0 and finite, since magnitudes are compared with it.")
    if relative is not None and not 0 < relative <= 1:
        raise UsageError(f"{what}: relative is a part of the largest magnitude. Pass more than 0 and at most 1.")
    check_values(what, values)
    return Threshold(value, relative, values)

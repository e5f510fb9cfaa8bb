"""Sparse hooks: a rank sends some of its elements.

`top_k` and `threshold` send the most important elements of each rank, and their indices. Different ranks choose different elements,
so an all-reduce cannot add them: the lists are gathered, and every rank adds all of them in rank order. `random_k` is a stage: all
ranks choose the same elements, so any dense hook can reduce them. Error feedback keeps what was not sent; `dgc` does so itself.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.collectives import all_gather, all_gather_into_tensor, all_to_all_single
from gradwire.collectives.lower import as_bytes
from gradwire.errors import UsageError
from gradwire.hooks.arguments import NamedStage, checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Stage, Trait, Turn, always_alike
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.clip_noise import Clip
from gradwire.hooks.composite import Wrapped
from gradwire.hooks.numerics.elementwise import as_dtype, count, drop_nonfinite_, number_dtype, real
from gradwire.hooks.numerics.rng import device_key, noise
from gradwire.hooks.numerics.select import largest, reaching

VALUES = (None, torch.float32, torch.bfloat16)
"""The dtypes in which values can be sent; None is the gradient's own."""


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
        return self.values.itemsize + self.indices.itemsize

    def pack(self, pairs: Pairs) -> Tensor:
        """Pairs as bytes; both lists must have the format's dtypes."""
        return torch.cat([as_bytes(pairs.values.contiguous()), as_bytes(pairs.indices.contiguous())])

    def unpack(self, packed: Tensor) -> Pairs:
        """The pairs in a row of bytes, which may begin anywhere in memory."""
        cut = packed.numel() // self.nbytes * self.values.itemsize
        # Copies, because a view in a wider dtype must be aligned to its size.
        return Pairs(packed[cut:].clone().view(self.indices), packed[:cut].clone().view(self.values))


class SendsPairs(CommHook):
    """A hook that sends indices and values of elements that differ between ranks."""

    values: torch.dtype | None
    dense_only = True
    alone = (
        "it gathers lists of indices and values, because each rank sends other elements, and an all-reduce needs every element of "
        "every rank"
    )

    def form(self, spec: BucketSpec) -> Format:
        own = spec.dtype.to_real()
        form = Format(self.values if self.values is not None and self.values.itemsize < own.itemsize else own)
        if count(spec) > torch.iinfo(form.indices).max:
            raise UsageError(
                f"{self!r} on a bucket of {count(spec)} elements: indices are sent as {form.indices}, which is too narrow. In the "
                "first step all parameters are one bucket unless you pass Buckets(from_start=True) to replicate(). Do that, or "
                "give a parameter as large as this mean() by partition()."
            )
        return form

    def check(self, spec: BucketSpec) -> None:
        CommHook.check(self, spec)
        self.form(spec)


def share_of(numel: int, *, ratio: float | None = None, k: int | None = None) -> int:
    wanted = math.ceil(ratio * numel) if ratio is not None else (k or 0)
    return min(numel, max(1, wanted))


def exchange(chosen: Pairs, form: Format, turn: Turn) -> Reduction:
    """Gather lists of equal length from all ranks: their mean is `value`, this rank's own list is `sent`."""
    lists = yield from gather(chosen, form, turn)
    return _rows(lists, chosen, turn)


def gather(chosen: Pairs, form: Format, turn: Turn) -> Any:
    packed = form.pack(chosen)
    gathered = packed.new_empty(turn.world_size * packed.numel())
    yield all_gather_into_tensor(gathered, packed, label=f"bucket {turn.spec.index}")
    return [form.unpack(row) for row in gathered.view(turn.world_size, packed.numel())]


def _rows(lists: list[Pairs], chosen: Pairs, turn: Turn) -> Reduced:
    """The mean of the lists, added in rank order; no list has an index twice. So every rank computes the same bits."""
    dtype, number = turn.spec.dtype, number_dtype(turn.spec.dtype)
    value = turn.room
    if value is None or value.dtype != number:
        value = torch.empty(count(turn.spec), dtype=number, device=chosen.values.device)
    _add_up(lists, value.zero_(), turn)
    sent = value if turn.donated else _spread(chosen, value)
    return Reduced(as_dtype(value, dtype), as_dtype(sent, dtype))


def _add_up(lists: list[Pairs], value: Tensor, turn: Turn) -> None:
    for indices, values in lists:
        value.index_add_(0, indices, values.to(value.dtype).div_(turn.counted))


def _spread(chosen: Pairs, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_copy_(0, chosen.indices.long(), chosen.values.to(like.dtype))


def _subtract(residual: Tensor, sent: list[Pairs]) -> None:
    """Subtract what was sent of each of several rows."""
    for row, (indices, values) in zip(residual.tensor_split(len(sent)), sent, strict=True):
        row.index_add_(0, indices, values.to(row.dtype), alpha=-1)
    drop_nonfinite_(residual)


class _Selecting(SendsPairs):
    """A hook that sends the elements that this rank chooses, without a state."""

    @abstractmethod
    def choose(self, flat: Tensor) -> Tensor:
        """The indices of the elements to send."""

    def chosen(self, grad: Tensor, turn: Turn) -> tuple[Pairs, Format]:
        flat, form = real(grad), self.form(turn.spec)
        indices = self.choose(flat)
        return Pairs(indices.to(form.indices), flat[indices].to(form.values)), form


@dataclass(frozen=True, slots=True, repr=False)
class TopK(_Selecting):
    """The hook of `top_k`: a fixed number of elements, one all-gather."""

    ratio: float | None
    k: int | None
    values: torch.dtype | None

    made_by = "top_k"
    collectives = 1
    capture_key = always_alike

    def choose(self, flat: Tensor) -> Tensor:
        return largest(flat, share_of(flat.numel(), ratio=self.ratio, k=self.k))

    def adds_residual(self, grad: Tensor, residual: Tensor, state: Any, turn: Turn) -> bool:
        """What was sent is subtracted element by element, not as a bucket of zeros and a few others."""
        return turn.donated and not grad.is_complex()

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        residual = turn.residual
        if residual is None:
            return (yield from exchange(*self.chosen(grad, turn), turn))
        chosen, form = self.chosen(residual.add_(grad).to(grad.dtype), turn)
        reduced = yield from exchange(chosen, form, replace(turn, room=grad))
        _subtract(residual, [chosen])
        return reduced

    def reduce_scatter(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        """Send each rank as many of the elements in its row: an equal share of the k of `reduce`, rounded up."""
        wanted = grad if turn.residual is None else turn.residual.add_(grad).to(grad.dtype)
        flat, form, size = real(wanted), self.form(turn.spec), turn.world_size
        rows, k = flat.tensor_split(size), self._per_row(flat.numel(), size)
        chosen = [Pairs(indices, row[indices].to(form.values)) for row in rows for indices in (largest(row, k),)]
        message = torch.stack([form.pack(Pairs(indices.to(form.indices), values)) for indices, values in chosen])
        received = torch.empty_like(message)
        yield all_to_all_single(received, message, label=f"bucket {turn.spec.index}")
        value = torch.zeros(rows[0].numel(), dtype=number_dtype(grad.dtype), device=grad.device)
        _add_up([form.unpack(packed) for packed in received], value, turn)
        if turn.residual is not None:
            _subtract(turn.residual, chosen)
        sent = value if turn.donated else torch.cat([_spread(pairs, value) for pairs in chosen])
        return Reduced(as_dtype(value, grad.dtype), as_dtype(sent, grad.dtype))

    def _per_row(self, numel: int, rows: int) -> int:
        return min(numel // rows, -(-share_of(numel, ratio=self.ratio, k=self.k) // rows))

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return (world_size - 1) * share_of(count(spec), ratio=self.ratio, k=self.k) * self.form(spec).nbytes

    def scatter_wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        return (world_size - 1) * self._per_row(count(spec), world_size) * self.form(spec).nbytes


@checks_arguments(ratio="(0, 1]", k="[1, inf)", values=VALUES)
def top_k(*, ratio: float | None = None, k: int | None = None, values: torch.dtype | None = None) -> CommHook:
    """Send the elements of largest magnitude: `k` of each bucket, or the `ratio`-th part of it. (arXiv 1704.05021, 1809.07599)

    Each rank chooses its own; all lists are gathered and added in rank order. Exactly k are chosen, rounded up and at least
    one; ties go to the lower index. What is left out is lost, so put `error_feedback()` around it. `values`, such as
    torch.bfloat16, is the dtype in which the elements are sent.

    On the wire: (n - 1) k (4 + itemsize(values)) bytes with n ranks: it grows with n, an all-reduce does not. It pays while n *
    ratio is well below 1. As a reduce-scatter it sends k / n elements of each row, which does not grow. Memory: all ranks' lists.

    >>> from gradwire.testing import simulate
    >>> done = simulate(top_k(k=1), [torch.tensor([5.0, 1.0]), torch.tensor([2.0, -3.0])])
    >>> done.reduced[0].value
    tensor([ 2.5000, -1.5000])
    """
    if (ratio is None) == (k is None):
        raise UsageError(f"top_k(ratio={ratio}, k={k}): how many elements? Pass one of ratio and k.")
    return TopK(ratio, k, values)


@dataclass(frozen=True, slots=True, repr=False)
class Threshold(_Selecting):
    """The hook of `threshold`: a varying number of elements, so the lengths are gathered before the lists."""

    value: float | None
    relative: float | None
    values: torch.dtype | None

    made_by = "threshold"
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


@checks_arguments(value="[0, inf)", relative="(0, 1]", values=VALUES)
def threshold(
    *, value: float | None = None, relative: float | None = None, values: torch.dtype | None = None
) -> CommHook:
    """Send the elements whose magnitude is at least `value`, or `relative` times the largest of the bucket. (Strom 2015)

    Their number depends on the gradients and differs between ranks, so the lengths are gathered first, and then the lists. It
    adapts where a fixed k does not: a step with small gradients costs little. Zeros are never sent, not even with `value=0.0`. What
    is left out is lost, so put `error_feedback()` around it. `values` is the dtype in which the elements are sent.

    On the wire: (n - 1) (8 + k (4 + itemsize(values))) bytes for n ranks and k chosen elements. On CUDA the host waits for the
    lengths: memory for the lists cannot be allocated without them.

    >>> from gradwire.testing import simulate
    >>> done = simulate(threshold(value=2.0), [torch.tensor([5.0, 1.0]), torch.tensor([2.0, -3.0])])
    >>> done.reduced[0].value
    tensor([ 3.5000, -1.5000])
    """
    if (value is None) == (relative is None):
        raise UsageError(f"threshold(value={value}, relative={relative}): which elements? Pass one of them.")
    return Threshold(value, relative, values)


@dataclass(frozen=True, slots=True, repr=False)
class RandomK(Wrapped):
    ratio: float
    seed: int

    made_by = "random_k"
    dense_only = True

    def __post_init__(self) -> None:
        what = f"random_k(ratio={self.ratio}) around {self.inner!r}"
        # A residual of one element would be added to another in the next step. What is not saved is not state but a plan.
        probe = self.inside(BucketSpec(0, ("probe",), ((8,),), ((1,),), torch.float32, torch.device("cpu")))
        keeps = self.inner.traits & (Trait.REMEMBERS | Trait.CONTINUES | Trait.LOCAL)
        if keeps or self.inner.save(self.inner.init(probe), probe):
            raise UsageError(
                f"{what}: the inner hook keeps state from step to step, but its bucket holds different elements in every step. Put "
                "error_feedback() to the left of random_k, and a hook without state, such as mean(), inside."
            )
        part: CommHook = self.inner
        while isinstance(part, Wrapped):
            if isinstance(part, Clip) and part.norm is not None:
                raise UsageError(
                    f"{what}: clip(norm=...) bounds the norm of each parameter, and the random elements belong to no parameter. "
                    "Put clip() to the left of random_k()."
                )
            part = part.inner

    def inside(self, spec: BucketSpec) -> BucketSpec:
        """A bucket of k elements that belong to no parameter."""
        k = share_of(spec.numel, ratio=self.ratio)
        return replace(spec, names=("random_k",), shapes=((k,),), strides=((1,),))

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        indices = self._indices(turn)
        # The inner bucket has no parameter names to tell it apart by.
        inside = replace(turn, spec=self.inside(turn.spec), path="/".join([turn.path, *turn.spec.names[:1]]))
        value, sent = yield from self.inner.reduce(grad[indices], state, inside)
        return Reduced(
            torch.zeros_like(grad).index_copy_(0, indices, value.view(-1)),
            grad if turn.donated else torch.zeros_like(grad).index_copy_(0, indices, sent.view(-1)),
        )

    def capture_key(self, turn: Turn) -> Any:
        return self.inner.capture_key(turn)

    def _indices(self, turn: Turn) -> Tensor:
        """One index in each of k ranges of the bucket of almost equal length: ascending and unique."""
        numel, k = turn.spec.numel, share_of(turn.spec.numel, ratio=self.ratio)
        device = turn.spec.device
        bounds = torch.arange(k + 1, device=device) * numel // max(k, 1)
        # Not from a generator of the device: those of other models draw other numbers, and ranks would choose other elements.
        uniform = noise(torch.arange(k, device=device), device_key(self.seed, turn, shared=True))
        return bounds[:-1] + (uniform.double() * bounds.diff()).long()

    @property
    def structure(self) -> str:
        return ""


@checks_arguments(ratio="(0, 1]")
def random_k(ratio: float, *, seed: int = 0) -> Stage:
    """Reduce only a random part of the bucket, the same on every rank, with the inner hook. (arXiv 1809.07599)

    Every rank derives the elements from the seed, so no indices are sent, and any hook without state can reduce them, such as
    `chain(random_k(0.01), cast(torch.bfloat16), mean())`. One element is drawn from each of k = ratio * numel ranges. The gradients
    of the others are zero in that step; put `error_feedback()` around it to send them later.

    On the wire: as the inner hook for k elements; unlike `top_k` it does not grow with the number of ranks.

    >>> from gradwire.hooks import chain, mean
    >>> from gradwire.testing import simulate
    >>> done = simulate(chain(random_k(0.5), mean()), [torch.ones(4), torch.ones(4)])
    >>> done.reduced[0].value.sum(), done.nbytes
    (tensor(2.), 8)
    """
    return NamedStage(f"random_k({ratio})", lambda inner: RandomK(inner, ratio, seed))

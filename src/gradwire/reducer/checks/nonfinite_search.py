"""Finds NaN and infinity in the gradients and averages of one step.

On the host, elements are found at once, by index. On a device nothing waits: the largest absolute value of each tensor is kept
there until it is read. What has been overwritten by then is reported by parameter, without an index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.collectives.finite import first_nonfinite, is_finite, max_norms, overflow_limit, probe
from gradwire.hooks.base import CommHook
from gradwire.hooks.bucket import BucketSpec, GradBucket

T = TypeVar("T")


class NonFiniteKind(IntEnum):
    """What an element is. The value is sent to other ranks."""

    NAN = 1
    INFINITE = 2
    BEYOND = 3
    """Finite, but not in the dtype in which it is reduced."""


class Found(NamedTuple):
    """An element that is not finite."""

    kind: NonFiniteKind
    parameter: int
    """The parameter's number in the model."""
    element: int | None
    """In the order of the parameter's shape; None if the gradient was overwritten before it was searched."""


class Look(NamedTuple):
    """A tensor that was examined: what was found on the host, or the largest absolute value of each parameter on a device."""

    found: Sequence[Found] = ()
    numbers: Sequence[int] = ()
    norms: Sequence[Tensor] = ()
    limit: float = math.inf
    """Values from here on overflow in the dtype in which they are reduced."""


class Search:
    """Examines the buckets of a model with these parameters."""

    def __init__(self, names: Sequence[str]) -> None:
        self.number = {name: number for number, name in enumerate(names)}

    def before(self, bucket: GradBucket, narrow: torch.dtype | None) -> Look:
        """Examine gradients that will be overwritten. `narrow`: see `probe`."""
        buffer = bucket.buffer().detach()
        if not on_host(buffer):
            return Look((), self._numbers(bucket.names()), max_norms(bucket.gradients()), overflow_limit(narrow))
        if math.isfinite(probe(buffer, narrow=narrow).item()):
            return Look()
        return Look(self._search(bucket.names(), bucket.gradients(), narrow))

    def average(self, spec: BucketSpec, result: Tensor) -> list[Found]:
        result = result.detach()
        return self._search(spec.names, [result] if result.is_sparse else spec.views(result.reshape(-1)), None)

    def in_grads(self, buckets: Sequence[GradBucket], hook: CommHook | None) -> list[Found]:
        """What is not finite in the `.grad` of some buckets' parameters. Waits for the device."""
        return [f for b in buckets for f in self._search(*_gradients(b), narrowest(hook, b.spec.dtype))]

    def in_grads_later(self, buckets: Sequence[GradBucket], hook: CommHook | None) -> list[Look]:
        """As `in_grads`, from norms, and without waiting."""
        rows = [_gradients(bucket) for bucket in buckets]
        looks = [Look()] * len(buckets)
        for dtype in dict.fromkeys(bucket.spec.dtype for bucket in buckets):
            some = [k for k, bucket in enumerate(buckets) if bucket.spec.dtype is dtype]
            norms = iter(max_norms([grad for k in some for grad in rows[k][1]]))  # in one call
            limit = overflow_limit(narrowest(hook, dtype))
            for k in some:
                looks[k] = Look((), self._numbers(rows[k][0]), [next(norms) for _ in rows[k][0]], limit)
        return looks

    def _numbers(self, names: Sequence[str]) -> list[int]:
        return [self.number[name] for name in names]

    def _search(self, names: Sequence[str], parts: Sequence[Tensor], narrow: torch.dtype | None) -> list[Found]:
        """What is not finite in `parts`, in the order of backward; else what would not be in the dtype `narrow`."""
        pairs = list(zip(self._numbers(names), parts, strict=True))
        for one in dict.fromkeys((None, narrow)):
            found = [
                Found(_kind(part, element), number, element)
                for number, part in in_order_of_backward(pairs)
                if (element := first_nonfinite(part, narrow=one)) is not None
            ]
            if found:
                return found
        return []


class StepCheck:
    """What is examined in one step. See Note [What a healthy step costs] in `nonfinite.py`."""

    def __init__(self, search: Search, hook: CommHook | None) -> None:
        """`hook`: one that only converts and adds up, so that its narrowest dtype explains an overflow."""
        self._search, self._hook = search, hook
        self.kept: list[GradBucket] = []
        """Their gradients stay in `.grad` until the end of the step."""
        self._before: list[Look] = []
        self._averages: list[tuple[BucketSpec, Tensor]] = []
        """On a device all, on the host those that are not finite."""
        self._norms: list[tuple[BucketSpec, Tensor]] = []
        """The largest absolute value of each average, once the step was released."""

    def add_gradients(self, bucket: GradBucket) -> None:
        self._before.append(self._search.before(bucket, narrowest(self._hook, bucket.spec.dtype)))

    def add_average(self, spec: BucketSpec, result: Tensor) -> None:
        """Examine an average; on a device, at the end of the step."""
        if not on_host(result) or not is_finite(result):
            self._averages.append((spec, result.detach()))

    def averages(self) -> list[Found]:
        """What is not finite in the averages. Waits for the device."""
        norms = read(max_norms([result for _, result in self._averages]))
        bad = [row for row, norm in zip(self._averages, norms, strict=True) if not math.isfinite(norm)]
        return [f for spec, result in bad for f in self._search.average(spec, result)]

    def gradients(self, *, kept: bool) -> list[Found]:
        """What was not finite in gradients before their reduction, with those that are still in `.grad` if `kept`."""
        found = [f for look in examine(self._before) for f in look]
        return found + (self._search.in_grads(self.kept, self._hook) if kept else [])

    def release(self) -> Tensor:
        """Replace all gradients by numbers on the device, for a late report. Does not wait for it. Returns a flag on the device: 1
        if an average is not finite, else 0."""
        self._before += self._search.in_grads_later(self.kept, self._hook)
        norms = max_norms([result for _, result in self._averages])
        self._norms = [(spec, norm) for (spec, _), norm in zip(self._averages, norms, strict=True)]
        self.kept, self._averages = [], []
        return _stack(norms).lt(math.inf).all().logical_not().float()

    def released(self) -> tuple[list[Found], list[Found]]:
        """What was not finite in gradients, and in averages, of a step that was released. Waits for the device. Of a bucket whose
        average is not finite, the parameter with the largest gradient is named."""
        numbers = [number for look in self._before for number in look.numbers]
        largest = dict(zip(numbers, read([norm for look in self._before for norm in look.norms]), strict=True))
        averages = []
        for (spec, _), norm in zip(self._norms, read([norm for _, norm in self._norms]), strict=True):
            if not math.isfinite(norm):
                number = max((self._search.number[name] for name in spec.names), key=lambda n: largest.get(n, 0.0))
                averages.append(Found(_kind_of(norm), number, None))
        return self.gradients(kept=False), averages


def narrowest(hook: CommHook | None, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype in which gradients of `dtype` may overflow before `hook` reduces them, if it is another one."""
    narrow = dtype if hook is None else hook.narrowest(dtype)
    return None if narrow == dtype else narrow


def read(numbers: Sequence[Tensor]) -> list[float]:
    """Numbers on a device. Waits for it, once."""
    values: list[float] = _stack(numbers).tolist() if numbers else []
    return values


def _stack(numbers: Sequence[Tensor]) -> Tensor:
    mixed = len({number.dtype for number in numbers}) > 1
    return torch.stack([number.double() for number in numbers] if mixed else list(numbers))


def examine(looks: Sequence[Look]) -> list[list[Found]]:
    """What is not finite, by look. Waits for the device, once."""
    norms = iter(read([norm for look in looks for norm in look.norms]))
    return [list(look.found) or _from_norms(look, [next(norms) for _ in look.norms]) for look in looks]


def _from_norms(look: Look, norms: list[float]) -> list[Found]:
    """The parameters that have a NaN or infinity; else those beyond the limit."""
    rows = list(in_order_of_backward(list(zip(look.numbers, norms, strict=True))))
    bad = [Found(_kind_of(norm), number, None) for number, norm in rows if not math.isfinite(norm)]
    return bad or [Found(NonFiniteKind.BEYOND, number, None) for number, norm in rows if norm >= look.limit]


def _kind_of(norm: float) -> NonFiniteKind:
    return NonFiniteKind.NAN if math.isnan(norm) else NonFiniteKind.INFINITE


def _gradients(bucket: GradBucket) -> tuple[list[str], list[Tensor]]:
    """The names of parameters that have a `.grad`, and these."""
    rows = [(name, p.grad) for name, p in zip(bucket.names(), bucket.parameters(), strict=True)]
    return [name for name, grad in rows if grad is not None], [grad for _, grad in rows if grad is not None]


def in_order_of_backward(parts: Sequence[tuple[int, T]]) -> Iterable[tuple[int, T]]:
    """Parts of a bucket, with the numbers of their parameters, in the order in which gradients arrive. That is how they lie in a
    bucket, except in the first step, where they are in the model's order: there the last ones come first."""
    numbers = [number for number, _ in parts]
    return reversed(parts) if numbers == sorted(numbers) else parts


def on_host(t: Tensor) -> bool:
    """Whether a value can be read without waiting for a device."""
    return t.device.type == "cpu"


def _kind(part: Tensor, element: int) -> NonFiniteKind:
    # Of a sparse tensor, one value of which is known to be bad, the worst kind is reported.
    values = part._values() if part.is_sparse else part.detach().reshape(-1)[element]
    values = values.float() if values.dtype.is_floating_point and values.dtype.itemsize == 1 else values
    if bool(values.isnan().any()):
        return NonFiniteKind.NAN
    return NonFiniteKind.INFINITE if bool(values.isinf().any()) else NonFiniteKind.BEYOND

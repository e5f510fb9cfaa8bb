"""What checks share: cases for the reference, how problems are reported, and a second group of the same ranks.

Note [Checks are generators]
A check yields a sentence for each wrong value and continues, so a rank that found one stays in step with the others. If a
check raises, communication itself has failed; then the world cannot be used any longer.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp, build
from gradwire.collectives.op_kinds import ONLY_BITS
from gradwire.collectives.reference import perform
from gradwire.errors import GroupError, InternalError, UsageError
from gradwire.groups.base import Group
from gradwire.groups.work import Work
from gradwire.testing.conformance.data import FLOAT8, LARGEST

Make = Callable[[int], Collective]
"""Returns a rank's Collective, with the same values each time."""
Problems = Iterator[str]
E = TypeVar("E", bound=BaseException)

PATIENCE = 10.0
"""Seconds that a meeting waits for missing ranks."""
SOON = 5.0
"""Seconds within which something counts as prompt, on a machine that is busy with other tests."""
SHORT = 0.25
"""A deadline that is meant to pass."""


def same(what: str, got: object, want: object) -> Problems:
    """Yield a sentence unless `got` equals `want`."""
    if got != want:
        yield f"{what} is {got!r}, expected {want!r}"


def holds(ok: bool, problem: str) -> Problems:
    """Yield `problem` unless `ok`."""
    if not ok:
        yield problem


def raises(kind: type[E], what: str, call: Callable[[], object]) -> Generator[str, None, E | None]:
    """Yield a sentence unless `call()` raises `kind`; return the error."""
    try:
        got = call()
    except kind as error:
        # Without its traceback, whose frames hold the group and this error: a cycle that keeps sockets open.
        return error.with_traceback(None)
    except Exception as error:
        yield f"{what} raised {type(error).__name__} ({error}), expected {kind.__name__}"
    else:
        yield f"{what} returned {got!r}, expected {kind.__name__}"
    return None


@dataclass(frozen=True, slots=True)
class Case:
    """One collective to compare with the reference. `plain` makes it in ordinary memory, if `make` uses other memory or strides."""

    what: str
    make: Make
    plain: Make | None = None

    def expected(self, group: Group) -> Collective:
        """A collective whose tensors hold what this rank's must hold afterward; results of small cases are computed once."""
        make = self.plain or self.make
        first = make(0)
        key = self.what, first.signature, group.size, first.device
        with _COMPUTING:
            if (ops := _EXPECTED.get(key)) is None:
                perform(ops := [first, *map(make, range(1, group.size))])
                if first.nbytes < 1 << 17:
                    _EXPECTED[key] = ops
            return ops[group.rank]


_EXPECTED: dict[object, list[Collective]] = {}
_COMPUTING = threading.Lock()


def against_reference(group: Group, cases: Sequence[Case], *, rounds: int = 1, at_once: int = 8) -> Problems:
    """Run every case, `rounds` times: every second one waited for at once, the others with up to `at_once` in flight, waiting in an
    order of this rank. Which ones changes with the round, and differs between worlds of even and of odd size."""
    for first in range(0, len(cases), 2 * at_once):
        chunk = [(case, case.expected(group)) for case in cases[first : first + 2 * at_once]]
        for number in range(rounds):
            alone, others = (chunk[(number + group.size + turn) % 2 :: 2] for turn in (0, 1))
            for case, want in alone:
                op = case.make(group.rank)
                group.run(op)
                yield from _differences(f"{case.what}, waited for at once", group, op, want)
            ops = [case.make(group.rank) for case, _ in others]
            works = [group.submit(op) for op in ops]
            for work in random.Random(group.rank).sample(works, len(works)):
                work.wait()
            for (case, want), op in zip(others, ops, strict=True):
                yield from _differences(f"{case.what}, with others in flight", group, op, want)


def _differences(what: str, group: Group, op: Collective, want: Collective) -> Problems:
    changed = op.kind is not OpKind.REDUCE or op.root == group.rank
    reduced = op.reduce_op if op.kind.reduces and changed else None
    for index, (got, right) in enumerate(zip(op.outputs, want.outputs, strict=True)):
        name = f"output {index}" if changed else "a tensor that is not the root's"
        yield from (f"{what}: {op}: {text}" for text in unlike(name, got, right, reduced, group.size))
    for index, (got, right) in enumerate(zip(op.inputs, want.inputs, strict=True)):
        if not any(got is output for output in op.outputs):
            name = f"input {index}, which is not an output,"
            yield from (f"{what}: {op}: {text}" for text in unlike(name, got, right))


def only_mistakes(group: Group, mistakes: Mapping[str, Callable[[], object]]) -> Problems:
    """Each of the mistakes, made on the last rank only, is a UsageError; the group goes on working."""
    if group.rank == group.size - 1:
        for what, call in mistakes.items():
            yield from raises(UsageError, what, call)
        yield from same("operations in flight after only mistakes", len(group.ledger.pending), 0)
    one = torch.ones(1)
    group.all_reduce(one)
    yield from same("all_reduce after another rank's mistakes", one.item(), float(group.size))


def unlike(what: str, got: Tensor, want: Tensor, reduced: ReduceOp | None = None, size: int = 1) -> Problems:
    """Yield a sentence unless the tensors agree: exactly, or within the error of reducing `size` values in any order."""
    got, want = (t.view(torch.uint8) if t.dtype in ONLY_BITS else t for t in (got, want))
    if got.shape != want.shape or got.dtype != want.dtype or got.layout != want.layout:
        yield f"{what} became {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
        return
    if not got.is_sparse and torch.equal(got, want):
        return
    wide_got, wide_want = _widened(got), _widened(want)
    slack = _slack(reduced, want.dtype, size, wide_want)
    # NaN is never drawn: it counts as wrong, because every comparison with it is false.
    wrong = ~((wide_got - wide_want).abs() <= slack) if wide_got.dtype.is_floating_point else wide_got != wide_want
    count = int(wrong.sum())
    if count:
        at = int(wrong.nonzero()[0, 0])
        yield (
            f"{what}: element {at} of {wrong.numel()} is {wide_got[at].item()}, expected {wide_want[at].item()}"
            f"{f' ({count} elements are wrong)' if count > 1 else ''}"
        )


@torch.no_grad()
def _widened(t: Tensor) -> Tensor:
    """As a flat vector of float64 or int64: every dtype converts to one of them."""
    if t.is_sparse:
        t = t.to_dense()
    t = t.detach().reshape(-1)
    if t.dtype.is_complex:
        return torch.view_as_real(t).reshape(-1).to(torch.float64)
    return t.to(torch.float64 if t.dtype.is_floating_point else torch.int64)


def _slack(reduced: ReduceOp | None, dtype: torch.dtype, size: int, want: Tensor) -> Any:
    """The error that a reduction may have, whatever its order and however often an engine rounds on the way.

    A sum of `size` values is rounded at most `size` times, each time by half an epsilon of a partial sum that is at most
    size * LARGEST; factors of PREMUL_SUM are at most LARGEST as well. A product is off by as many epsilons of itself.
    """
    inexact = dtype.is_floating_point or dtype.is_complex
    if reduced is None or not inexact or reduced in (ReduceOp.MIN, ReduceOp.MAX):
        return 0.0
    if dtype in FLOAT8 and reduced in (ReduceOp.SUM, ReduceOp.PRODUCT) and size <= 8:
        return 0.0
    limits = torch.finfo(dtype)
    if reduced is ReduceOp.PRODUCT and not dtype.is_complex:
        return want.abs() * limits.eps * size + limits.tiny * LARGEST**size
    largest = LARGEST**size if reduced is ReduceOp.PRODUCT else size * LARGEST * LARGEST
    return limits.eps / 2 * size * largest


def side_group(group: Group) -> Group:
    """All ranks of `group` as a separate subgroup."""
    side = group.split(0)
    if side is None:
        raise InternalError(f"{group}.split(0) returned None on a rank that passed a color.")
    return side


def meet(side: Group) -> None:
    """Wait for every rank."""
    side.submit(build.barrier(label="conformance: meet").within(PATIENCE)).wait()


def held_up(group: Group, submit: Callable[[], Work], look: Callable[[Work], Problems]) -> Problems:
    """Submit an operation, on the last rank only after all others have inspected theirs in flight; then wait for it."""
    side = side_group(group)
    if group.rank == group.size - 1:
        meet(side)
        work = submit()
    else:
        work = submit()
        yield from look(work)
        meet(side)
    yield from same("wait()", work.wait(), True)
    side.close()


def beside(check: Callable[[Group, Group], Problems]) -> Callable[[Group], Problems]:
    """A check that gets a separate subgroup of all ranks too, in which they meet, also once more at the end."""

    @functools.wraps(check)
    def run(group: Group) -> Problems:
        side = side_group(group)
        yield from check(group, side)
        try:
            meet(side)
        except GroupError:  # the group under test is broken, and may have broken its subgroup too
            side.abort("conformance: the end")
        side.close()

    return run

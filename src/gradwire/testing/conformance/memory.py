"""Checks of what tensors may look like: strides, no dimensions, leaves of autograd, the group's own memory."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gradwire.collectives import Collective, ReduceOp, build
from gradwire.collectives.op_kinds import ONLY_BITS
from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Case, Problems, against_reference, holds, same, unlike
from gradwire.testing.conformance.data import LAYOUTS, arrange, draw
from gradwire.testing.conformance.operations import Shaper, as_is, every_kind

_MOVES = ("broadcast", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "gather", "scatter")
"""The collectives that do not reduce."""


def _placed(size: int, shape: tuple[int, ...], placed: Shaper = as_is, reference: Shaper = as_is) -> list[Case]:
    """One case of each collective, its tensors passed through `placed`, and those of the reference through `reference`."""
    root = size - 1
    plain = every_kind(size, shape, reference, root=root)
    return [Case(name, make, plain[name]) for name, make in every_kind(size, shape, placed, root=root).items()]


def check_layouts(group: Group) -> Problems:
    """Tensors that are transposed, strided, or part of a larger storage, as inputs and outputs; not the same on all ranks."""

    def mixed(t: Tensor) -> Tensor:
        return arrange(t, "transposed") if group.rank % 2 else t

    places: list[Shaper] = [partial(arrange, layout=layout) for layout in LAYOUTS]
    yield from against_reference(group, [c for place in (*places, mixed) for c in _placed(group.size, (3, 4), place)])


def check_dtypes_without_arithmetic(group: Group) -> Problems:
    """Dtypes that only hold bits (float4, float8_e8m0fnu) are moved by every collective that does not reduce."""
    cases: list[Case] = []
    for dtype in sorted(ONLY_BITS, key=str):
        cases += _placed(group.size, (12,), lambda t, d=dtype: t.view(d), lambda t: t.view(torch.uint8))  # type: ignore[misc]
    yield from against_reference(group, [case for case in cases if case.what in _MOVES])


LARGE, SIZEABLE = 300_007, 40_009
"""Elements of tensors that no engine moves in one piece, or along with a control message."""


def check_large(group: Group) -> Problems:
    """Large tensors, in ordinary memory, in the group's own, and in the group's own on some ranks only."""

    def own(t: Tensor) -> Tensor:
        return group.allocate(t.numel(), dtype=t.dtype, device=t.device).view(t.shape).copy_(t)

    def mixed(t: Tensor) -> Tensor:
        return own(t) if group.rank % 2 else t

    def reduced(place: Shaper, op: ReduceOp, dtype: torch.dtype) -> Case:
        def make(rank: int, place: Shaper = place) -> Collective:
            return build.all_reduce(place(draw((LARGE,), dtype, 48, rank)), op=op)

        return Case(f"large all_reduce {op.name}", make, lambda rank: make(rank, as_is))

    several = ((ReduceOp.AVG, torch.float32), (ReduceOp.MAX, torch.float32), (ReduceOp.AVG, torch.bfloat16))
    cases = [reduced(own, op, dtype) for op, dtype in several]
    cases += [reduced(place, *several[0]) for place in (as_is, mixed)]
    # In a large world, where the cost of a case is quadratic in its size, the mixture represents both.
    for place in (own, mixed) if group.size <= 4 else (mixed,):
        cases += _placed(group.size, (SIZEABLE,), place)
    yield from against_reference(group, cases)


def check_channels_last(group: Group) -> Problems:
    """Images in channels_last order keep it."""

    def images(t: Tensor) -> Tensor:
        return t.to(memory_format=torch.channels_last) if t.dim() == 4 else t

    yield from against_reference(group, _placed(group.size, (2, 3, 4, 5), images))
    t = images(draw((2, 3, 4, 5), torch.float32, 45, group.rank))
    group.all_reduce(t)
    kept = t.is_contiguous(memory_format=torch.channels_last)
    yield from holds(kept, "all_reduce: a channels_last tensor lost its strides")


def check_gaps(group: Group) -> Problems:
    """Memory between the elements of a strided tensor is not written."""
    homes: list[Tensor] = []

    def spaced(t: Tensor) -> Tensor:
        homes.append(torch.full((*t.shape, 2), 7.0))
        return homes[-1][..., 0].copy_(t)

    for name, make in every_kind(group.size, (5,), spaced).items():
        homes.clear()
        group.run(make(group.rank))
        gaps = torch.cat([home[..., 1].flatten() for home in homes])
        yield from unlike(f"{name}: the memory between the elements", gaps, torch.full_like(gaps, 7.0))


def check_leaves(group: Group) -> Problems:
    """Leaves that require grad can be written, and stay leaves."""

    yield from against_reference(group, _placed(group.size, (3,), Tensor.requires_grad_))
    parameter = torch.nn.Parameter(draw((3,), torch.float32, 47, group.rank))
    group.all_reduce(parameter)
    kept = parameter.is_leaf and parameter.requires_grad and parameter.grad_fn is None
    yield from holds(kept, "all_reduce: a parameter is no longer a leaf that requires grad")


def check_inference_tensors(group: Group) -> Problems:
    """Tensors made in `torch.inference_mode()`, as in evaluation, can be written, whichever thread does it."""

    def made_there(t: Tensor) -> Tensor:
        with torch.inference_mode():
            return t.clone()

    shapes = ((3,), (4, 6), (SIZEABLE,))
    yield from against_reference(group, [case for shape in shapes for case in _placed(group.size, shape, made_there)])
    plain = _placed(group.size, (5,))
    for dtype in (torch.bfloat16, torch.complex64, torch.bool):
        plain.append(Case("all_reduce", lambda rank, d=dtype: build.all_reduce(made_there(draw((7,), d, 49, rank)))))  # type: ignore[misc]
    with torch.inference_mode():
        yield from against_reference(group, plain)
    yield from against_reference(group, plain)  # what the group keeps from evaluation must not break training
    # Ordinary tensors that were reduced during evaluation are still ordinary tensors.
    weight = torch.nn.Parameter(draw((3,), torch.float32, 50, group.rank))
    with torch.inference_mode():
        group.all_reduce([weight, weight.detach().clone()])
    (gradient,) = torch.autograd.grad((weight * weight).sum(), [weight])
    yield from unlike("the gradient of a parameter reduced in inference mode", gradient, 2 * weight.detach())


def check_allocate(group: Group) -> Problems:
    """Memory from the group has the requested dtype, size and device, and can be communicated."""
    device = torch.get_default_device()
    for dtype, numel in ((torch.float32, 1000), (torch.float32, 0), (torch.bfloat16, 17), (torch.int64, 3)):
        first, second = (group.allocate(numel, dtype=dtype, device=device) for _ in range(2))
        for t in (first, second):
            facts = (tuple(t.shape), t.dtype, t.device.type, t.is_contiguous())
            yield from same("shape, dtype, device and contiguity", facts, ((numel,), dtype, device.type, True))
        first.fill_(group.rank + 1)
        second.fill_(0)
        group.all_reduce(first)
        total = torch.full_like(first, group.size * (group.size + 1) // 2)
        yield from unlike(f"all_reduce of {numel} allocated {dtype}", first, total, ReduceOp.SUM, group.size)
        yield from unlike("a second allocation, while the first is in use,", second, torch.zeros_like(second))
        # Part of an allocation: a bucket's gradients are views of it.
        if numel > 2:
            first.fill_(group.rank)
            group.broadcast(first[1:-1], src=group.size - 1)
            want = torch.full_like(first, group.size - 1)
            want[0] = want[-1] = group.rank
            yield from unlike("broadcast of the middle of an allocation", first, want)

"""Checks of dtypes, layouts and devices: what cannot be communicated is refused before any data moves, the rest arrives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gradwire.collectives import Collective, ReduceOp, build
from gradwire.collectives.dtypes import MOVES, ONLY_BITS, REDUCES
from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Problems, only_mistakes, unlike
from gradwire.testing.conformance.data import draw

Make = Callable[[], Tensor]


def _unmovable() -> dict[str, Make]:
    """Tensors that no collective accepts: dtypes that torch cannot copy, and tensors without data."""
    everything = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    everything = {dtype for dtype in everything if not str(dtype).startswith("torch.q")}  # creating one is deprecated
    return {
        **{str(d): partial(torch.empty, 4, dtype=d, device="cpu") for d in sorted(everything - MOVES, key=str)},
        "a meta tensor": partial(torch.empty, 4, device="meta"),
    }


def check_refused_dtypes(group: Group) -> Problems:
    """A dtype or device that cannot be communicated, or not with this reduction, is a UsageError on the rank that passes it."""
    size = group.size

    def reduce(dtype: torch.dtype, op: ReduceOp) -> None:
        factor = 2.0 if op is ReduceOp.PREMUL_SUM else None
        group.submit(build.all_reduce(torch.zeros(64, dtype=torch.uint8).view(dtype), op=op, factor=factor))

    mistakes: dict[str, Callable[[], object]] = {}
    for name, make in _unmovable().items():
        places = [make() for _ in range(size)]
        mistakes[f"all_reduce of {name}"] = partial(group.all_reduce, make())
        mistakes[f"broadcast of {name}"] = partial(group.broadcast, make(), src=0)
        mistakes[f"send of {name}"] = partial(group.send, make(), dst=(group.rank + 1) % size)
        mistakes[f"all_gather of {name}"] = partial(group.all_gather, places, make())
        mistakes[f"reduce_scatter of {name}"] = partial(group.reduce_scatter, make(), places)
    for dtype in sorted(MOVES, key=str):
        for op in set(ReduceOp) - REDUCES.get(dtype, frozenset()):
            mistakes[f"{op.name} of {dtype}"] = partial(reduce, dtype, op)
    yield from only_mistakes(group, mistakes)


def check_dtypes_without_arithmetic(group: Group) -> Problems:
    """Dtypes that only hold bits (float4, float8_e8m0fnu) are moved by every collective that does not reduce."""
    size, rank, last = group.size, group.rank, group.size - 1

    def value(dtype: torch.dtype, r: int, n: int = 1) -> Tensor:
        return draw((48 * n,), torch.uint8, 62, r).view(dtype)

    def blank(dtype: torch.dtype, n: int = 1) -> Tensor:
        return torch.ones(48 * n, dtype=torch.uint8).view(dtype)

    def moved(op: Collective, outputs: list[Tensor], want: list[Tensor]) -> Problems:
        group.run(op)
        for got, right in zip(outputs, want, strict=True):
            yield from unlike(f"{op}", got.view(torch.uint8), right.view(torch.uint8))

    for d in sorted(ONLY_BITS, key=str):
        all_values = [value(d, r) for r in range(size)]
        outs, whole = [blank(d) for _ in range(size)], blank(d, size)
        yield from moved(build.all_gather(outs, value(d, rank)), outs, all_values)
        yield from moved(build.all_gather_into_tensor(whole, value(d, rank)), list(whole.view(size, -1)), all_values)
        mine = value(d, rank)
        yield from moved(build.broadcast(mine, src=last), [mine], all_values[last:])
        outs = [blank(d) for _ in range(size)]
        op = build.gather(value(d, rank), outs if rank == 0 else None, dst=0)
        yield from moved(op, outs if rank == 0 else [], all_values if rank == 0 else [])
        place = blank(d)
        yield from moved(
            build.scatter(place, all_values if rank == last else None, src=last), [place], [value(d, rank)]
        )
        outs = [blank(d) for _ in range(size)]
        yield from moved(build.all_to_all(outs, [value(d, rank) for _ in range(size)]), outs, all_values)

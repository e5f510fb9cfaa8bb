"""Checks of inputs and outputs that share memory: every input is read before any output is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp
from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Case, Problems, against_reference, only_mistakes, same
from gradwire.testing.conformance.data import draw

Home = Callable[[int, int], Tensor]
"""`home(numel, rank)` is a flat tensor with the rank's values; all tensors of a case are views of it."""
View = tuple[int, int]
"""First element and length."""

UNEVEN = "all_to_all_single of different lengths"

SMALL, LARGE, ROUNDS = 8, 20_011, 3
"""Elements of the tensors, and repetitions of the large cases in a small world of processes: there, faults may depend on timing."""


def _ordinary(numel: int, rank: int) -> Tensor:
    return draw((numel,), torch.int32, 61, rank)


def _table(size: int, n: int, rank: int) -> dict[str, tuple[OpKind, list[View], list[View]]]:
    """Every kind whose outputs are not its inputs: a rank's inputs and outputs, which overlap in each meaningful way."""
    last, half, total = size - 1, n // 2, size * n
    parts = [(i * n, n) for i in range(size + 1)]
    first, own, across = parts[0], (rank * n, n), (half, n)
    whole, shifted, second = (0, total), (half + 1, total), (total, total)

    def over(place: int) -> list[View]:
        """Outputs of which the one of rank `place` is the first part."""
        return parts[1 : place + 1] + parts[:1] + parts[place + 1 : size]

    def at_root(views: list[View]) -> list[View]:
        return views if rank == last else []

    single, into, scatter = OpKind.ALL_TO_ALL_SINGLE, OpKind.ALL_GATHER_INTO_TENSOR, OpKind.REDUCE_SCATTER_TENSOR
    return {
        "all_reduce into a tensor that overlaps it": (OpKind.ALL_REDUCE, [whole], [shifted]),
        "reduce into a tensor that overlaps it": (OpKind.REDUCE, [whole], [shifted]),
        "broadcast into a tensor that overlaps it": (OpKind.BROADCAST, [whole], [shifted]),
        "all_gather of its first output": (OpKind.ALL_GATHER, [first], over(0)),
        "all_gather of its last output": (OpKind.ALL_GATHER, [first], over(last)),
        "all_gather of its own place": (OpKind.ALL_GATHER, [first], over(rank)),
        "gather of its first output": (OpKind.GATHER, [first], at_root(over(0))),
        "gather of its own place": (OpKind.GATHER, [first], at_root(over(last))),
        "scatter into another rank's input": (OpKind.SCATTER, at_root(parts[:size]), [first]),
        "all_to_all in place": (OpKind.ALL_TO_ALL, parts[:size], parts[:size]),
        "all_to_all into its inputs, rotated": (OpKind.ALL_TO_ALL, parts[:size], parts[1:size] + parts[:1]),
        "all_to_all_single in place": (single, [whole], [whole]),
        "all_to_all_single forwards": (single, [whole], [shifted]),
        "all_to_all_single backwards": (single, [shifted], [whole]),
        UNEVEN: (single, [(0, sum(n + to for to in range(size)))], [(0, size * (n + rank))]),
        "all_gather_into_tensor of its own place": (into, [own], [whole]),
        "all_gather_into_tensor of the beginning": (into, [first], [whole]),
        "all_gather_into_tensor across two places": (into, [across], [whole]),
        "two pairs of all_gather_into_tensor, crossed": (into, [(2 * total - n, n), first], [whole, second]),
        "reduce_scatter_tensor into its own place": (scatter, [whole], [own]),
        "reduce_scatter_tensor into the beginning": (scatter, [whole], [first]),
        "reduce_scatter_tensor across two places": (scatter, [whole], [across]),
        "two pairs of reduce_scatter_tensor, crossed": (scatter, [whole, second], [(total, n), (total - n, n)]),
        "reduce_scatter into its first input": (OpKind.REDUCE_SCATTER, parts[:size], [first]),
        "reduce_scatter into its last input": (OpKind.REDUCE_SCATTER, parts[:size], [parts[last]]),
    }


def _make(size: int, n: int, what: str, home: Home, rank: int) -> Collective:
    kind, inputs, outputs = _table(size, n, rank)[what]
    t = home(max(start + length for start, length in (*inputs, *outputs)), rank)
    views = {(start, length): t[start : start + length] for start, length in (*inputs, *outputs)}
    return Collective(
        kind,
        tuple(views[view] for view in inputs),
        tuple(views[view] for view in outputs),
        reduce_op=ReduceOp.SUM if kind.reduces else None,
        root=size - 1 if kind in (OpKind.REDUCE, OpKind.BROADCAST, OpKind.GATHER, OpKind.SCATTER) else None,
        splits=((n + rank,) * size, tuple(n + to for to in range(size))) if what == UNEVEN else None,
    )


def _cases(size: int, n: int, home: Home) -> list[Case]:
    make = partial(partial, _make, size, n)
    return [Case(f"{n} elements: {what}", make(what, home), make(what, _ordinary)) for what in _table(size, n, 0)]


def check_aliasing(group: Group) -> Problems:
    """Inputs that overlap outputs, in ordinary memory and in the group's own, small and large, give the reference's results."""

    def own(numel: int, rank: int) -> Tensor:
        memory = group.allocate(numel, dtype=torch.int32, device=torch.get_default_device())
        return memory.copy_(_ordinary(numel, rank))

    for home in (_ordinary, own):
        yield from against_reference(group, _cases(group.size, SMALL, home))
        rounds = 1 if group.in_one_process or group.size > 3 else ROUNDS
        yield from against_reference(group, _cases(group.size, LARGE, home), rounds=rounds)


def check_overlapping_outputs(group: Group) -> Problems:
    """Outputs that overlap each other, or themselves, are refused on the rank that passes them; interleaved ones are not."""
    size = group.size
    t, home = torch.zeros(2), torch.zeros(2 * size + 1)
    windows = [home[i : i + 2] for i in range(size)]
    mistakes: dict[str, Callable[[], object]] = {
        "all_reduce of one tensor twice": lambda: group.all_reduce([t, t]),
        "broadcast of overlapping tensors": lambda: group.broadcast([home[:3], home[1:4]], src=0),
        "all_reduce of an expanded tensor": lambda: group.all_reduce(torch.zeros(1).expand(3)),
        "all_reduce of windows that overlap": lambda: group.all_reduce(home.unfold(0, 2, 1)),
    }
    if size > 1:
        mistakes |= {
            "all_gather into overlapping windows": lambda: group.all_gather(windows, t),
            "all_gather into one tensor": lambda: group.all_gather([t] * size, torch.zeros(2)),
            "gather into overlapping windows": lambda: group.gather(t, windows, dst=group.rank),
            "all_to_all into overlapping windows": lambda: group.all_to_all(windows, [t] * size),
        }
    yield from only_mistakes(group, mistakes)
    columns = torch.zeros(3, size, dtype=torch.int32)
    group.all_gather(list(columns.unbind(1)), torch.full((3,), group.rank, dtype=torch.int32))
    yield from same("all_gather into the columns of a matrix", columns.tolist(), [list(range(size))] * 3)

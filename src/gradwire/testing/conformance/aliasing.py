"""Checks of inputs and outputs that share memory: every input is read before any output is written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.collectives import Collective, OpKind, ReduceOp, build
from gradwire.groups.base import Group
from gradwire.testing.conformance.cases import Case, Make
from gradwire.testing.conformance.compare import Problems, against_reference, only_mistakes, same
from gradwire.testing.conformance.data import draw

Home = Callable[[int, int], Tensor]
"""`home(numel, rank)` is a flat tensor with the rank's values; all tensors of a case are views of it."""

SMALL, LARGE, ROUNDS = 8, 20_011, 3
"""Elements of the tensors, and how often the large cases are repeated in a small world of processes: there, faults may depend on
timing."""


def _cases(size: int, n: int, home: Home) -> list[Case]:
    """Every kind whose outputs are not its inputs, with tensors that overlap in each meaningful way."""
    plain = _makers(size, n, _ordinary)
    return [Case(f"{n} elements: {what}", make, plain[what]) for what, make in _makers(size, n, home).items()]


def _ordinary(numel: int, rank: int) -> Tensor:
    return draw((numel,), torch.int32, 61, rank)


def _makers(size: int, n: int, home: Home) -> dict[str, Make]:
    """What each rank submits in each case."""

    def whole(rank: int) -> Tensor:
        return home(size * n, rank)

    def gather_over(rank: int, place: int) -> list[Tensor]:
        """Outputs of which the one of rank `place` is the first n elements of the home."""
        parts = list(home((size + 1) * n, rank).split(n))
        return parts[1 : place + 1] + parts[:1] + parts[place + 1 : size]

    def shifted(rank: int) -> tuple[Tensor, Tensor]:
        """Two tensors, one of which begins inside the other."""
        t = home(size * n + n // 2 + 1, rank)
        return t[: size * n], t[-size * n :]

    def all_gather(rank: int, place: int) -> Collective:
        outputs = gather_over(rank, place)
        return build.all_gather(outputs, outputs[place])

    def gather(rank: int, root: int, place: int) -> Collective:
        outputs = gather_over(rank, place)
        return build.gather(outputs[place], outputs if rank == root else None, dst=root)

    def scatter(rank: int, root: int) -> Collective:
        parts = list(whole(rank).split(n))
        return build.scatter(parts[(root + 1) % size], parts if rank == root else None, src=root)

    def all_to_all(rank: int, turn: int) -> Collective:
        parts = list(whole(rank).split(n))
        return build.all_to_all(parts[turn:] + parts[:turn], parts)

    def single(rank: int, back: bool) -> Collective:
        a, b = shifted(rank)
        return build.all_to_all_single(a, b) if back else build.all_to_all_single(b, a)

    def split_sizes(rank: int) -> Collective:
        t = home(size * (n + size), rank)
        mine = [n + to for to in range(size)]
        return build.all_to_all_single(
            t[: size * (n + rank)], t[: sum(mine)], output_split_sizes=[n + rank] * size, input_split_sizes=mine
        )

    def into_tensor(rank: int, offset: int) -> Collective:
        t = whole(rank)
        return build.all_gather_into_tensor(t, t[offset : offset + n])

    def crossed_pairs(rank: int) -> Collective:
        """Two pairs as one operation; each input is part of the other pair's output."""
        a, b = home(2 * size * n, rank).split(size * n)
        return build.all_gather_into_tensor([a, b], [b[-n:], a[:n]])

    def reduced(rank: int, offset: int) -> Collective:
        t = whole(rank)
        return build.reduce_scatter_tensor(t[offset : offset + n], t)

    def reduced_list(rank: int, place: int) -> Collective:
        parts = list(whole(rank).split(n))
        return build.reduce_scatter(parts[place], parts)

    def reduced_pairs(rank: int) -> Collective:
        a, b = home(2 * size * n, rank).split(size * n)
        return build.reduce_scatter_tensor([b[:n], a[-n:]], [a, b])

    def other_output(rank: int, kind: OpKind) -> Collective:
        a, b = shifted(rank)
        root = None if kind is OpKind.ALL_REDUCE else size - 1
        return Collective(kind, (a,), (b,), None if kind is OpKind.BROADCAST else ReduceOp.SUM, root)

    last = size - 1
    return {
        "all_reduce into a tensor that overlaps it": lambda rank: other_output(rank, OpKind.ALL_REDUCE),
        "reduce into a tensor that overlaps it": lambda rank: other_output(rank, OpKind.REDUCE),
        "broadcast into a tensor that overlaps it": lambda rank: other_output(rank, OpKind.BROADCAST),
        "all_gather of its first output": lambda rank: all_gather(rank, 0),
        "all_gather of its last output": lambda rank: all_gather(rank, last),
        "all_gather of its own place": lambda rank: all_gather(rank, rank),
        "gather of its first output": lambda rank: gather(rank, last, 0),
        "gather of its own place": lambda rank: gather(rank, 0, 0),
        "scatter into another rank's input": lambda rank: scatter(rank, last),
        "all_to_all in place": lambda rank: all_to_all(rank, 0),
        "all_to_all into its inputs, rotated": lambda rank: all_to_all(rank, 1),
        "all_to_all_single in place": lambda rank: build.all_to_all_single(*[whole(rank)] * 2),
        "all_to_all_single forwards": lambda rank: single(rank, False),
        "all_to_all_single backwards": lambda rank: single(rank, True),
        "all_to_all_single of different lengths": split_sizes,
        "all_gather_into_tensor of its own place": lambda rank: into_tensor(rank, rank * n),
        "all_gather_into_tensor of the beginning": lambda rank: into_tensor(rank, 0),
        "all_gather_into_tensor across two places": lambda rank: into_tensor(rank, n // 2),
        "two pairs of all_gather_into_tensor, crossed": crossed_pairs,
        "reduce_scatter_tensor into its own place": lambda rank: reduced(rank, rank * n),
        "reduce_scatter_tensor into the beginning": lambda rank: reduced(rank, 0),
        "reduce_scatter_tensor across two places": lambda rank: reduced(rank, n // 2),
        "two pairs of reduce_scatter_tensor, crossed": reduced_pairs,
        "reduce_scatter into its first input": lambda rank: reduced_list(rank, 0),
        "reduce_scatter into its last input": lambda rank: reduced_list(rank, last),
    }


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
            "all_to_all into overlapping windows": lambda: group.all_to_all(
                windows, [torch.zeros(2) for _ in range(size)]
            ),
        }
    yield from only_mistakes(group, mistakes)
    columns = torch.zeros(3, size, dtype=torch.int32)
    group.all_gather(list(columns.unbind(1)), torch.full((3,), group.rank, dtype=torch.int32))
    yield from same("all_gather into the columns of a matrix", columns.tolist(), [list(range(size))] * 3)

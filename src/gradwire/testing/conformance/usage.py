"""Checks that mistakes are found on the rank that makes them, before anything is communicated."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gradwire.collectives import ReduceOp, Scope, build
from gradwire.collectives.op_kinds import MOVES, REDUCES
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Problems, only_mistakes, raises, same, side_group


def check_usage_errors(group: Group) -> Problems:
    """Bad roots, counts, sizes, peers and colors raise UsageError on the rank that passes them; the group keeps working."""
    size, rank = group.size, group.rank
    t, many = torch.zeros(2), [torch.zeros(2) for _ in range(size + 1)]
    mistakes: dict[str, Callable[[], object]] = {
        "broadcast from a rank that does not exist": lambda: group.broadcast(t, src=size),
        "reduce to a rank that does not exist": lambda: group.reduce(t, dst=size + 3),
        "gather to a rank that does not exist": lambda: group.gather(t, dst=size),
        "broadcast from a negative rank": lambda: group.broadcast(t, src=-1),
        "all_gather with too many outputs": lambda: group.all_gather(many, t),
        "all_gather with too few outputs": lambda: group.all_gather(many[: size - 1], t),
        "reduce_scatter with too many inputs": lambda: group.reduce_scatter(t, many),
        "all_to_all with too many inputs": lambda: group.all_to_all(many[:size], many),
        "all_gather with a place of the wrong size": lambda: group.all_gather(many[:size], torch.zeros(3)),
        "all_gather_into_tensor of the wrong size": lambda: group.all_gather_into_tensor(torch.zeros(2 * size + 2), t),
        "reduce_scatter_tensor of the wrong size": lambda: group.reduce_scatter_tensor(t, torch.zeros(2 * size + 2)),
        "all_to_all_single in parts that do not fit": lambda: group.all_to_all_single(
            torch.zeros(size + 1), torch.zeros(size + 1), [size + 1], [size + 1]
        ),
        "gather with outputs off the root": lambda: group.gather(t, many[:size], dst=(rank + 1) % size),
        "scatter with no inputs at the root": lambda: group.scatter(t, None, src=rank),
        "send to itself": lambda: group.send(t, dst=rank),
        "receive from itself": lambda: group.recv(t, src=rank),
        "send to a rank that does not exist": lambda: group.send(t, dst=size),
        "split by a negative color": lambda: group.split(-2),
        "all_reduce of nothing": lambda: group.all_reduce([]),
        "AVG of integers": lambda: group.all_reduce(torch.zeros(2, dtype=torch.int64), ReduceOp.AVG),
    }
    if group.layout is None:
        inside = build.all_reduce(torch.zeros(2)).among(Scope.INSIDE)
        mistakes["submit with a scope, to a group without hosts"] = lambda: group.submit(inside)
        mistakes["run with a scope, on a group without hosts"] = lambda: group.run(inside)
    yield from only_mistakes(group, mistakes)
    one, sub = torch.full((1,), float(size)), side_group(group)
    sub.all_reduce(one)
    yield from same("all_reduce in a subgroup after another rank's mistakes", one.item(), float(size * size))
    sub.close()


def check_wrong_timeouts(group: Group) -> Problems:
    """A timeout that is not a number, not above 0, NaN or infinite is a UsageError on the rank that passes it; the group works."""
    work = group.all_reduce(torch.ones(1))
    before = group.timeout
    takers: dict[str, Callable[[Any], object]] = {
        "set_timeout": group.set_timeout,
        "monitored_barrier": group.monitored_barrier,
        "recover": group.recover,
        "a collective": lambda value: group.submit(build.barrier().within(value)),
    }
    wrong: list[Any] = [math.nan, "5", True]
    if group.rank == group.size - 1:
        for name, call in takers.items():
            for value in [*wrong, 0, -1.0, math.inf, 1e18]:
                yield from raises(UsageError, f"{name} with a timeout of {value!r}", partial(call, value))
        for call in (work.wait, group.close, group.flush_completions):
            for value in wrong:
                yield from raises(UsageError, f"{call.__name__}({value!r})", partial(call, value))
        yield from same("the timeout after only mistakes", group.timeout, before)
        yield from same("whether the group was closed by a mistake", group.closed, False)
    for value in (0, -1.0, math.inf):
        yield from same(f"wait({value}) of a finished operation", work.wait(value), True)
    yield from only_mistakes(group, {})


def check_refused_dtypes(group: Group) -> Problems:
    """A dtype or device that cannot be communicated, or not with this reduction, is a UsageError on the rank that passes it."""
    size = group.size

    def reduce(dtype: torch.dtype, op: ReduceOp) -> None:
        factor = 2.0 if op is ReduceOp.PREMUL_SUM else None
        group.submit(build.all_reduce(torch.zeros(64, dtype=torch.uint8).view(dtype), op=op, factor=factor))

    # What no collective accepts: dtypes that torch cannot copy (to create a quantized tensor is deprecated), and no data.
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - MOVES
    named = {str(d): partial(torch.empty, 4, dtype=d, device="cpu") for d in sorted(dtypes, key=str)}
    named = {name: make for name, make in named.items() if not name.startswith("torch.q")}
    mistakes: dict[str, Callable[[], object]] = {}
    for name, make in [*named.items(), ("a meta tensor", partial(torch.empty, 4, device="meta"))]:
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

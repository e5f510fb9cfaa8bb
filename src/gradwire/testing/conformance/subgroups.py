"""Checks of `split`."""

from __future__ import annotations

import torch

from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Problems, holds, same, side_group


def _sum_of_ranks(sub: Group, members: list[int], me: int) -> Problems:
    """All-reduce, broadcast and, with two members or more, a message inside `sub`, whose rank i is `members[i]`."""
    yield from same("size of a subgroup", sub.size, len(members))
    yield from same("rank in a subgroup", sub.rank, members.index(me))
    if sub.size != len(members):
        return  # no peers: ranks that wait for each other here would wait for long
    t = torch.tensor([me])
    sub.all_reduce(t)
    yield from same(f"sum of members of the subgroup of ranks {members}", t.item(), sum(members))
    t = torch.tensor([me])
    sub.broadcast(t, src=sub.size - 1)
    yield from same(f"broadcast from the last of {members}", t.item(), members[-1])
    if sub.size > 1:
        place = torch.tensor([-1])
        received = sub.recv(place, src=(sub.rank - 1) % sub.size, async_op=True)
        sub.send(torch.tensor([me]), dst=(sub.rank + 1) % sub.size)
        received.wait()
        yield from same(f"message from the neighbor in {members}", place.item(), members[sub.rank - 1])


def check_split(group: Group) -> Problems:
    """Ranks with one color form a group, in rank order; the parent keeps working."""
    color = group.rank % 2
    sub = group.split(color)
    if sub is None:
        yield f"split({color}) returned None"
    else:
        yield from _sum_of_ranks(sub, list(range(color, group.size, 2)), group.rank)
        sub.close()
    t = torch.tensor([1])
    group.all_reduce(t)
    yield from same("all_reduce on the parent, after its subgroups were closed", t.item(), group.size)


def check_split_key(group: Group) -> Problems:
    """`key` orders the members; equal keys are ordered by rank."""
    members = list(reversed(range(group.size)))
    sub = group.split(3, key=-group.rank)
    if sub is not None:
        yield from _sum_of_ranks(sub, members, group.rank)
        sub.close()
    alike = group.split(0, key=7)
    if alike is not None:
        yield from same("rank in a subgroup with equal keys", alike.rank, group.rank)
        alike.close()
    yield from holds(sub is not None and alike is not None, "split with a key returned None")


def check_split_none(group: Group) -> Problems:
    """A rank that passes no color joins no group."""
    last = group.size - 1
    sub = group.split(None if group.rank == last else 0)
    if group.rank == last:
        yield from same("split(None)", sub, None)
    elif sub is None:
        yield "split(0) returned None"
    else:
        yield from _sum_of_ranks(sub, list(range(last)), group.rank)
        sub.close()


def check_split_nested(group: Group) -> Problems:
    """A subgroup can be split, and groups of the same ranks do not interfere."""
    outer, other = side_group(group), side_group(group)
    a, b = torch.tensor([1.0]), torch.tensor([10.0])
    first, second = (outer, a), (other, b)
    # Each rank submits to the two groups in a different order: only groups that are truly independent allow that.
    order = (first, second) if group.rank % 2 else (second, first)
    for work in [sub.all_reduce(t, async_op=True) for sub, t in order]:
        work.wait()
    yield from same("sums in two groups of the same ranks", (a.item(), b.item()), (group.size, 10.0 * group.size))
    color = int(outer.rank < outer.size // 2)
    inner = outer.split(color)
    members = [rank for rank in range(outer.size) if int(rank < outer.size // 2) == color]
    if inner is None:
        yield "split of a subgroup returned None"
    else:
        yield from _sum_of_ranks(inner, members, group.rank)
        inner.close()
    outer.close()
    other.close()

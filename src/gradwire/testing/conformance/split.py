"""Checks of `split`."""

from __future__ import annotations

import torch

from gradwire.groups.base import Group
from gradwire.testing.conformance.compare import Problems, same, side_group


def _inside(sub: Group | None, members: list[int], group: Group) -> Problems:
    """All-reduce, broadcast and, with two members or more, a message inside `sub`, whose rank i is `members[i]`. Closes it."""
    if sub is None:
        yield f"split returned None on a member of {members}"
        return
    place = (sub.size, sub.rank)
    yield from same("size and rank in a subgroup", place, (len(members), members.index(group.rank)))
    if sub.size == len(members):  # others would wait long for their peers
        t, last, message = torch.tensor([group.rank]), torch.tensor([group.rank]), torch.tensor([-1])
        sub.all_reduce(t)
        sub.broadcast(last, src=sub.size - 1)
        totals = (t.item(), last.item())
        yield from same(f"sum in, and broadcast from the last of {members}", totals, (sum(members), members[-1]))
        if sub.size > 1:
            received = sub.recv(message, src=(sub.rank - 1) % sub.size, async_op=True)
            sub.send(torch.tensor([group.rank]), dst=(sub.rank + 1) % sub.size)
            received.wait()
            yield from same(f"message from the neighbor in {members}", message.item(), members[sub.rank - 1])
    sub.close()


def check_split(group: Group) -> Problems:
    """Ranks with one color form a group, in rank order; the parent keeps working."""
    color = group.rank % 2
    yield from _inside(group.split(color), list(range(color, group.size, 2)), group)
    t = torch.tensor([1])
    group.all_reduce(t)
    yield from same("all_reduce on the parent, after its subgroups were closed", t.item(), group.size)


def check_split_key(group: Group) -> Problems:
    """`key` orders the members; equal keys are ordered by rank."""
    members = list(range(group.size))
    yield from _inside(group.split(3, key=-group.rank), members[::-1], group)
    yield from _inside(group.split(0, key=7), members, group)


def check_split_none(group: Group) -> Problems:
    """A rank that passes no color joins no group."""
    last = group.size - 1
    sub = group.split(None if group.rank == last else 0)
    if group.rank == last:
        yield from same("split(None)", sub, None)
    else:
        yield from _inside(sub, list(range(last)), group)


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
    halves = list(range(group.size // 2)), list(range(group.size // 2, group.size))
    color = int(outer.rank >= outer.size // 2)
    yield from _inside(outer.split(color), halves[color], group)
    outer.close()
    other.close()

"""Two questions about a group that may stand in wrappers: which groups it is made of, and what a part of it looks like."""

from __future__ import annotations

from collections.abc import Iterator

from gradwire.groups.base import Group
from gradwire.groups.wrapper import BookedWrapper, GroupWrapper


def layers(group: Group) -> Iterator[Group]:
    """The group, the group inside it, and so on to the one that communicates."""
    yield group
    while isinstance(group, (GroupWrapper, BookedWrapper)):
        group = group.inner
        yield group


def subgroup(group: Group, ranks: list[int], *, name: str) -> Group:
    """The group of `ranks` of this one, in the same wrappers. Only its members call it, as with `Group.subgroup`."""
    if isinstance(group, (GroupWrapper, BookedWrapper)):
        return group.rewrap(subgroup(group.inner, ranks, name=name))
    return group.subgroup(ranks, name=name)

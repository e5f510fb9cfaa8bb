"""The groups inside a wrapped group."""

from __future__ import annotations

from collections.abc import Iterator

from gradwire.groups.base import Group
from gradwire.groups.wrappers import GroupWrapper


def layers(group: Group) -> Iterator[Group]:
    """The group, the group inside it, and so on down to the one that communicates."""
    yield group
    while isinstance(group, GroupWrapper):
        group = group.inner
        yield group

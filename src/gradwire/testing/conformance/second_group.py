"""A second group of the same ranks, to communicate over while the group under test is deliberately blocked or broken."""

from __future__ import annotations

from gradwire.collectives import build
from gradwire.errors import GroupError, InternalError
from gradwire.groups.base import Group

PATIENCE = 10.0
"""Seconds that a meeting waits for missing ranks."""

SOON = 5.0
"""Seconds within which something counts as prompt, on a machine that is busy with other tests."""

SHORT = 0.25
"""A deadline that is meant to pass."""


def side_group(group: Group) -> Group:
    """All ranks of `group` as a separate subgroup."""
    side = group.split(0)
    if side is None:
        raise InternalError(f"{group}.split(0) returned None on a rank that passed a color.")
    return side


def meet(side: Group) -> None:
    """Wait for every rank."""
    side.submit(build.barrier(label="conformance: meet").within(PATIENCE)).wait()


def part(side: Group) -> None:
    """Like `meet`, if the group under test is already broken and may have broken its subgroup too."""
    try:
        meet(side)
    except GroupError:
        side.abort("conformance: the end")
    side.close()

"""A second group of the same ranks, to speak over while the group under test is held up or broken on purpose."""

from __future__ import annotations

from gradwire.collectives import build
from gradwire.errors import GroupError, InternalError
from gradwire.groups.base import Group

PATIENCE = 10.0
"""Seconds after which a rank that does not come to a meeting is given up."""

SOON = 5.0
"""Seconds within which a thing counts as prompt, on a machine that is busy with other tests."""

SHORT = 0.25
"""A deadline that is meant to pass."""


def beside(group: Group) -> Group:
    """All ranks of `group` as a subgroup of their own."""
    side = group.split(0)
    if side is None:
        raise InternalError(f"{group}.split(0) returned None on a rank that named a color.")
    return side


def meet(side: Group) -> None:
    """Wait for every rank."""
    side.submit(build.barrier(label="conformance: meet").within(PATIENCE)).wait()


def part(side: Group) -> None:
    """As `meet`, where the group under test is broken already and may have taken its subgroup along."""
    try:
        meet(side)
    except GroupError:
        side.abort("conformance: the end")
    side.close()

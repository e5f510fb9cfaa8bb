"""The views of an elastic run, as its members have described them, and what has happened to its processes. Without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.observe.units import printable
from gradwire.runtime.fault_record import FILE

ENDS = frozenset({"died", "left"})
"""Kinds of faults that are the end of a process."""


@dataclass(frozen=True, slots=True)
class RunView:
    """A view, as the first of its members has entered it."""

    epoch: int
    members: tuple[str, ...]
    """In the order of their ranks."""
    step: int
    """How many steps were committed when it began."""
    retried: bool
    """Whether the next step was begun in the view before, and is computed again."""
    time: float
    """When it began, in seconds since 1970."""


class ProcessFault(NamedTuple):
    """What has happened to a process, or was done to it on purpose."""

    time: float
    member: str
    kind: str
    text: str


def read_views(described: Iterable[Mapping[str, Any]]) -> list[RunView]:
    """The views that members have described, oldest first."""
    found: dict[int, RunView] = {}
    for facts in described:
        view = RunView(**{**facts, "members": tuple(facts["members"])})
        known = found.setdefault(view.epoch, view)
        time, retried = min(known.time, view.time), known.retried or view.retried
        found[view.epoch] = replace(known, time=time, retried=retried)
    return [found[epoch] for epoch in sorted(found)]


def read_faults(directory: Path) -> list[ProcessFault]:
    """What launchers and injected faults have recorded in the directory of a run; damaged lines are left out."""
    found = []
    try:
        lines = (directory / FILE).read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            facts = printable(json.loads(line))
            kind, member = str(facts["kind"]), str(facts["member"])
            text = facts.get("text") or "injected fault: {kind} at {place} of step {step} on {member}".format(**facts)
            found.append(ProcessFault(float(facts["time"]), member, kind, str(text)))
        except (LookupError, RecursionError, TypeError, ValueError):
            continue
    return found


def changed(before: RunView | None, view: RunView, faults: Sequence[ProcessFault]) -> str:
    """Who is in `view` and was not in the one before, or is not any more; of the first view nothing.

    >>> views = [RunView(n, members, 0, False, 0.0) for n, members in enumerate([("a", "b"), ("b", "c")])]
    >>> changed(*views, [ProcessFault(0.0, "a", "died", "")])
    'a died, c joined'
    """
    if before is None:
        return ""
    how = {fault.member: fault.kind for fault in faults if fault.kind in ENDS}
    went = [f"{one} {how.get(one, 'is out')}" for one in before.members if one not in view.members]
    return ", ".join([*went, *(f"{one} joined" for one in view.members if one not in before.members)])

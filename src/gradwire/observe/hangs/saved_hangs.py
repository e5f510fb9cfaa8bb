"""Hang reports as they were saved in the directory of a run (see `hang_report.as_dict`). Without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradwire.observe.hangs.analysis import Cause
from gradwire.observe.rings.ring import Record
from gradwire.runtime.host import ProcessState


def saved_hangs(directory: Path) -> list[dict[str, Any]]:
    """All that can be read, the first one first, each with the name of its `file`."""
    found = []
    for path in sorted(directory.glob("hang-*.json"), key=lambda path: (len(path.name), path.name)):
        try:
            report = json.loads(path.read_text())
        except (OSError, RecursionError, ValueError):  # half written, as the disk is full, or not ours
            continue
        if isinstance(report, dict):
            found.append({**report, "file": path.name})
    return found


def suspects_of(hang: dict[str, Any]) -> list[dict[str, Any]]:
    """The ranks that kept others waiting."""
    found = hang.get("suspects")
    return (
        [one for one in found if isinstance(one, dict) and _is_rank(one.get("rank"))] if isinstance(found, list) else []
    )


def waiting_of(hang: dict[str, Any]) -> list[int]:
    """The ranks that waited."""
    found = hang.get("waiting")
    return [rank for rank in found if _is_rank(rank)] if isinstance(found, list) else []


def _is_rank(value: object) -> bool:
    return type(value) is int


def is_about(hang: dict[str, Any], record: Record | None) -> bool:
    """Whether ranks waited in this collective; None: in what is not recorded."""
    known = hang.get("collective")
    if record is None or not isinstance(known, dict):
        return record is None and known is None
    number = "ordinal" if record.ordinal else "seq"  # messages have no ordinal
    return (known.get("group"), known.get(number)) == (record.group, getattr(record, number))


def collective_text(facts: object) -> str:
    """A collective in a report that was saved."""
    known = facts if isinstance(facts, dict) else {}
    return f"{known.get('op', 'a collective')} {known.get('label') or ''}".strip()


def suspect_text(one: dict[str, Any]) -> str:
    """A rank in a report that was saved, and what was known of it."""
    cause = next((cause for cause in Cause if cause.name == one.get("cause")), Cause.UNKNOWN)
    at = f": {one['where']}" if one.get("where") else ""
    state = "" if one.get("state") == ProcessState.GONE.value else f" ({one.get('state')})"
    parts = [f"rank {one.get('rank')}{state}: {cause.value}{at}"]
    if one.get("other"):
        parts.append(f"it had submitted {collective_text(one['other'])}")
    parameters = one.get("parameters")
    if isinstance(parameters, list) and parameters:
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        any_of = "one of " if more and not one.get("certain") else ""
        parts.append(f"bucket {one.get('bucket')} waited for {any_of}{parameters[0]}{more}")
    return ", ".join(parts)

"""Which gradients the models of this process wait for: what a hang report asks of a rank that keeps others waiting.

It is asked from another thread, while the thread that runs backward may be anywhere: everything here is a read of a list or a flag.
"""

from __future__ import annotations

import weakref
from typing import Any

from gradwire.reducer.machine import State

_MOST_NAMES = 1000
_reducers: weakref.WeakSet[Any] = weakref.WeakSet()


def register(reducer: Any) -> None:
    """Include a reducer, which is held weakly."""
    _reducers.add(reducer)


def awaited_gradients() -> list[dict[str, Any]]:
    """Of each model that is in a step: the bucket that is to be launched next, and the parameters in it without a gradient."""
    return [_facts(reducer) for reducer in list(_reducers) if reducer.machine.state is not State.RESTING]


def _facts(reducer: Any) -> dict[str, Any]:
    machine = reducer.machine
    bucket = min(machine.next_bucket, len(machine.members) - 1)
    missing = [i for i in reducer.intake.missing(machine.members[bucket]) if not reducer.used.has_counted(i)]
    return {
        "group": reducer.group.name,
        "group_id": reducer.group.ledger.events.group_id,
        "model": reducer.events.model,
        "rank": reducer.group.rank,
        "step": reducer.iterations.number,
        "bucket": bucket,
        "missing": [machine.names[i] for i in missing[:_MOST_NAMES]],
    }

"""Which gradients the models of this process wait for in a backward: what a hang report asks of a rank that keeps others waiting.

Nothing is recorded for it beforehand, so gradients are reported as cheaply as without it: see `listening.py`.

Note [Asked from another thread]
The thread that runs backward may be anywhere when it is asked, and is usually stuck. Everything here is a read of a list, a flag or
`.grad` under the interpreter's lock. In a step that polls, `.grad` was None before backward and the engine sets it once, so
it is either None or complete.
"""

from __future__ import annotations

import weakref
from typing import Any

from gradwire.reducer.intake.arrivals import GradListener
from gradwire.reducer.intake.used_parameters import UsedParameters
from gradwire.reducer.iterations import Iterations
from gradwire.reducer.machine import Machine, State

_MOST_NAMES = 1000


class AwaitedGradients:
    """The gradients of one model that have not arrived in the current step."""

    def __init__(self, machine: Machine, listener: GradListener, iterations: Iterations, used: UsedParameters) -> None:
        self._machine, self._listener, self._iterations, self._used = machine, listener, iterations, used
        _models.add(self)

    def facts(self) -> dict[str, Any] | None:
        """The bucket that is to be launched next, and the parameters in it without a gradient; None outside of a backward
        that is to be averaged. See Note [Asked from another thread]."""
        machine, group = self._machine, self._iterations.group
        if machine.state is State.RESTING:
            return None
        bucket = min(machine.next_bucket, len(machine.members) - 1)
        missing = [i for i in machine.members[bucket] if not machine.is_ready(i)]
        if missing and self._used.learning:
            missing = [i for i in missing if not self._used.has_counted(i)]
        if missing:
            missing = self._listener.not_arrived(missing)
        return {
            "group": group.name,
            "rank": group.rank,
            "step": self._iterations.number,
            "bucket": bucket,
            "missing": [machine.names[i] for i in missing[:_MOST_NAMES]],
        }


_models: weakref.WeakSet[AwaitedGradients] = weakref.WeakSet()


def awaited_gradients() -> list[dict[str, Any]]:
    """What each model of this process waits for, by bucket: see `AwaitedGradients.facts`."""
    found = [model.facts() for model in list(_models)]
    return [facts for facts in found if facts is not None]

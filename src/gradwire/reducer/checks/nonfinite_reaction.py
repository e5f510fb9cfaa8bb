"""What is done about values that are not finite, once all ranks know of them."""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.errors import NonFiniteGradient
from gradwire.groups.base import Group
from gradwire.policies import NonFinite
from gradwire.recorder import flight_recorder
from gradwire.reducer.checks.nonfinite_report import Report
from gradwire.reducer.hook.hook_states import HookStates
from gradwire.reducer.reductions import StepRejected, StepSkipped
from gradwire.runtime.warnings import warn_user

_MANY = (10, 100, 1000, 10000)
"""Numbers of steps skipped in a row at which a warning is shown again."""


class Reaction:
    """What a policy does about values that are not finite."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self.skipped = 0
        """How many steps were skipped, as far as it is known."""
        self._in_a_row = 0
        self._last = -1
        self._shown = False

    def prepare(self, states: HookStates) -> None:
        """A step of a hook begins that may be dropped."""
        states.commit()  # of a backward that has failed
        states.can_roll_back = self._policy is not NonFinite.RECORD

    def react(self, report: Report, group: Group, states: Iterable[HookStates], *, drop: bool = True) -> None:
        """Record what was found, and raise StepRejected, or StepSkipped if `drop`, for a step that all ranks of `group` drop."""
        error = report.error(self._policy)
        flight_recorder.warn(str(error), rank=group.rank, group=group.name, step=report.step)
        skipped = self._policy is NonFinite.SKIP and drop
        if skipped or self._policy is NonFinite.RAISE:
            for one in states:
                one.roll_back()
        if self._policy is NonFinite.RAISE:
            raise StepRejected(error)
        if self._policy is NonFinite.SKIP:
            self.skipped += 1
            self._in_a_row = self._in_a_row + 1 if report.step == self._last + 1 else 1
            self._last = report.step
        if group.rank == 0:
            self._show(error)
        self._shown = True
        if skipped:
            raise StepSkipped(error)

    def _show(self, error: NonFiniteGradient) -> None:
        if not self._shown:
            warn_user(f"{error} Later ones are recorded only.")
        elif self._in_a_row in _MANY:
            warn_user(
                f"{self._in_a_row} steps in a row were skipped, so the model no longer trains. The last one: {error}"
            )

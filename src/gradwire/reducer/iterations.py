"""Iterations: counts the iterations of a training loop, and fails one on all ranks when it fails on this one.

Note [Iterations]
A rank counts the iterations that are over for its caller: those that were averaged, and those that raised. When a step fails,
its rank aborts the group and gives the number of that iteration in the reason, which is text because every kind of group carries
text to the other ranks. A rank that has not come to the end of that iteration raises the failure there, once. A rank that has
finished it already must not raise in the next one, or ranks would go on one iteration apart: it warns instead. And since an abort
may hit one rank in an earlier or a later iteration than another, all ranks compare their counts in recovery, and one that is behind
raises in as many further iterations as the others have lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from gradwire.autograd.backward_errors import COMPILED, FAILED, around_backward
from gradwire.autograd.graph import reachable_parameters, reaches_mark
from gradwire.errors import GroupAborted, GroupError, UsageRuntimeError
from gradwire.groups.base import Group
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import summary
from gradwire.reducer.checks.nonfinite_report import StepRejected, StepSkipped
from gradwire.reducer.machine import Machine
from gradwire.reducer.model_events import ModelEvents
from gradwire.runtime.threads import weakly

_REASON = re.compile(r"step (\d+) failed on rank \d+ with ")


class Iterations:
    """The iterations of one model on one rank.

    `abandon(why)`, a bound method held weakly, drops what the step has in flight.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        group: Group,
        machine: Machine,
        events: ModelEvents,
        *,
        abandon: Callable[[str], object],
    ) -> None:
        self.group = group
        self.events = events
        self.number = 0
        """How many iterations have ended for the caller, averaged or failed: see [Iterations]."""
        self.expects_backward = False
        """Whether there was a forward, synchronized or not, since the last step ended."""
        self.failure: BaseException | None = None
        """What a further backward of the failed step raises."""
        self.halfway: BaseException | None = None
        """What a backward has raised after gradients had arrived, which may be its own. See `gradwire.elasticity`."""
        self.last_error: str | None = None
        self.survive: Callable[[GroupError], bool] | None = None
        """Called when a step is lost because the group has failed; True: nothing is raised. See `gradwire.elasticity`."""
        self.before_backward: Callable[[], None] | None = None
        """Called when a forward with a graph has ended. See `gradwire.elasticity`."""
        self._parameters = parameters
        self._machine = machine
        self._abandon = weakly(abandon)
        around_backward(FAILED, self.backward_failed)
        around_backward(COMPILED, self._refuse_compiled)

    @property
    def begins(self) -> int:
        """At the beginning of a forward: the number of its iteration."""
        return self.number + self._machine.in_backward  # then the last one ended without an error

    def forward_ended(self) -> None:
        """A forward with a graph has ended: the step fails if its backward does."""
        self.expects_backward = True
        self.failure = None
        if self.before_backward is not None:
            self.before_backward()

    def ended(self) -> None:
        self.number += 1
        self.expects_backward = False

    def fail(self, error: BaseException) -> None:
        """The step is lost: drop what is in flight, and tell the other ranks, which may be waiting for this one.

        The group is aborted, so that no rank hangs; before the next step all ranks recover it together.
        """
        iteration, begun = self.number, self._machine.in_backward
        self.reject(error)
        if self.survive is not None and not begun:
            return  # nothing is in flight: the others go on when this process has ended, or has handled the error
        if self.group.failure is None:
            self.group.abort(reason(iteration, self.group.rank, error))
        self.group.ledger.reported = self.failure = self.group.failure

    def failed(self, error: BaseException) -> bool:
        """The step is lost. True: it fails on all ranks, and `error` is to be raised; False: members may be lost."""
        if self.survive is not None and isinstance(error, GroupError) and self.survive(error):
            self.reject(error)
            return False
        self.fail(error)
        return True

    def fail_forward(self, error: BaseException) -> None:
        """As `fail`, before or after a forward, whose iteration it is."""
        self.number = self.begins
        self.fail(error)

    def reject(self, error: BaseException, *, skip: bool = False) -> None:
        """All ranks drop the step alike: the group stays as it is. `skip`: nothing is raised, so it has not failed."""
        self.last_error = f"{type(error).__name__}: {error}"
        kind, label = (RecordKind.STEP_ENDED, "") if skip else (RecordKind.STEP_FAILED, summary(error))
        self.events.record(kind, self.number, label=label)
        self._abandon(self.last_error)
        self.ended()

    def drop(self, rejected: StepRejected, *, used: bool) -> None:
        """Drop a rejected step: raise, or leave no gradients to the optimizer, unless it has `used` them in backward."""
        skip = isinstance(rejected, StepSkipped) and not used
        self.reject(rejected.error, skip=skip)
        if not skip:
            raise rejected.error from None
        for parameter in self._parameters:
            parameter.grad = None

    def backward_failed(self, tensors: Any, error: BaseException) -> None:
        """A backward has raised `error`, in this model or in another: if it was of this one, the step has failed."""
        if self.is_of_this_model(tensors):
            self.fail(error)
            if self.survive is not None and any(p.grad is not None for p in self._parameters):
                self.halfway = error

    def _refuse_compiled(self, tensors: Any) -> None:
        if self.is_of_this_model(tensors):
            raise UsageRuntimeError(
                f"backward of a replicated model on rank {self.group.rank} under compiled autograd: it runs no callbacks at the "
                "end of a backward, so gradients would never be averaged. Set torch._dynamo.config.compiled_autograd = False; "
                "torch.compile of the model may stay."
            )

    def is_of_this_model(self, tensors: Any) -> bool:
        """Whether a backward from `tensors` is one that is expected. Outputs of the model are marked with this object."""
        return self.expects_backward and (
            bool(reachable_parameters(tensors, self._parameters)) or reaches_mark(tensors, self)
        )


def reason(iteration: int, rank: int, error: BaseException) -> str:
    """Why the group is aborted: iteration number `iteration` raised `error` on `rank`.

    >>> reason(3, 1, ValueError("no"))
    'step 3 failed on rank 1 with ValueError: no'
    """
    return f"step {iteration} failed on rank {rank} with {type(error).__name__}: {error}"


def failed_iteration(failure: BaseException) -> int | None:
    """The iteration that a group's failure names, or None if it was aborted for another reason."""
    found = _REASON.search(failure.reason) if isinstance(failure, GroupAborted) else None
    return None if found is None else int(found.group(1))

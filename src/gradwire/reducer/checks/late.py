"""LateChecks: a result that stays on the device, and that the host reads one step later.

Note [Late results]
A host that waits for the device before the optimizer's step loses its lead: a few percent of a step. So, where the device can act
on the result itself, the host does not wait. It gives the flag on the device to the attached optimizers, which skip the step (see
`attached_optimizers.py`), and reads it at the end of the next step's reductions. This is possible with hooks that pass NaN on (see
Note [What a healthy step costs] in `nonfinite.py`): all ranks have the same flag. `NonFinite.RECORD` needs no optimizer.

All ranks read the flag of a step at the same place, since a bad one is followed by an exchange. So they must agree that the host
does not wait: they ask each other until all can; after that, what changes is changed by the program that all ranks run. They begin
again when the states of the hook are replaced, as in a recovery, and after `join()`. A result that is pending then is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.collectives.finite import MAX_NORM_DTYPES
from gradwire.reducer.buckets.layout import ParameterSpec
from gradwire.reducer.checks.nonfinite_report import any_rank
from gradwire.reducer.checks.nonfinite_search import StepCheck
from gradwire.reducer.hook.hook_states import HookStates
from gradwire.reducer.hook.runner import HookRunner


class LateCheck:
    """The check of a step whose result is on the device: a flag that is copied to the host behind the work enqueued so far."""

    def __init__(self, check: StepCheck, runner: HookRunner, step: int) -> None:
        self.check, self.step = check, step
        self.hook, self.states = runner.name, runner.states
        self.flag = flag = check.release()
        cuda = flag.device.type == "cuda"
        self._on_host = torch.empty(flag.shape, dtype=flag.dtype, pin_memory=cuda)
        self._on_host.copy_(flag, non_blocking=True)
        self._copied = torch.cuda.current_stream(flag.device).record_event() if cuda else None

    def is_bad(self) -> bool:
        """Whether the flag is 1. Waits until the device has computed it."""
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._on_host.item())


class LateChecks:
    """The late checks of one model. See Note [Late results]."""

    def __init__(self, specs: Sequence[ParameterSpec], *, skips: bool) -> None:
        """`skips`: the optimizers of all ranks must be able to skip a bad step on the device."""
        self._device = specs[0].device
        self._same = all(s.device == self._device and not s.sparse and s.dtype in MAX_NORM_DTYPES for s in specs)
        self.skips = skips
        self.pending: LateCheck | None = None
        """That of the last step, until it is read."""
        self._states: HookStates | None = None
        self._uneven = False
        self._steps = 0
        """Since ranks have begun to ask each other."""
        self._agreed = False

    def begin(self, runner: HookRunner) -> bool:
        """Whether the check of the step that begins is read late."""
        if runner.states is not self._states or runner.uneven != self._uneven:
            self._states, self._uneven = runner.states, runner.uneven
            self._agreed, self._steps = False, 0
            runner.optimizers.stepped.clear()
            return False
        self._steps += 1
        # What is identical on all ranks comes first.
        allowed = self._same and not runner.uneven and on_device(self._device)
        allowed = allowed and runner.group.orders_streams(self._device)
        return allowed and (self._agreed or self._agree(runner)) and self._can_skip(runner)

    def _can_skip(self, runner: HookRunner) -> bool:
        return not self.skips or runner.optimizers.can_skip()

    def _agree(self, runner: HookRunner) -> bool:
        """Whether all ranks can: they ask each other in the first, second, fourth, … step, until all can."""
        if self._steps & (self._steps - 1):
            return False
        self._agreed = not any_rank(not self._can_skip(runner), runner.group, self._device)
        return self._agreed

    def enqueue(self, check: StepCheck, runner: HookRunner, *, step: int) -> LateCheck:
        """All reductions of a step are enqueued: keep its result until the next step."""
        self.pending = late = LateCheck(check, runner, step)
        if self.skips:
            runner.optimizers.skip_next(late.flag)
        return late

    def take(self, runner: HookRunner) -> LateCheck | None:
        """The check of the last step, if it has not been read. It is not pending any more."""
        late, self.pending = self.pending, None
        return late if late is not None and late.states is runner.states else None


def on_device(device: torch.device) -> bool:
    return device.type == "cuda"

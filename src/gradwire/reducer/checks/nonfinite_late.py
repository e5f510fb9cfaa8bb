"""LateChecks: gradients are checked on a CUDA device, and the host learns the result one step later.

Note [A result that comes late]
A host that must know before the optimizer's step whether averages are finite has to wait for the device there. It loses its
lead, and the device then waits for the host: a few percent of a step. So, where the device can act on the result itself, the
host does not wait. It gives the flag on the device to the attached optimizers, which skip the step (see
`attached_optimizers.py`), and reads it at the end of the next step's reductions, when it has long been there. This is possible
with hooks that pass NaN on (see Note [What a healthy step costs] in `nonfinite.py`): all ranks have the same flag, and none
needs another's. `NonFinite.RECORD` needs no optimizer, as nothing is skipped.

All ranks read the flag of a step at the same place, since a bad one is followed by an exchange of what they have found. So they
must agree that the host does not wait, whatever is different on one of them: a compiler for the kernels, an optimizer that is
not attached. They ask each other until all can; after that, what changes is changed by the program that all ranks run. They
begin again when the states of the hook are replaced, as in a recovery, where a rank may have made a step more than others or be
new, and after `join()`, where a rank may have made none. A result that is pending when a recovery begins is dropped.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gradwire.policies import NonFinite
from gradwire.reducer.buckets.layout import ParameterSpec
from gradwire.reducer.checks.nonfinite_report import any_rank
from gradwire.reducer.checks.nonfinite_scan import Scan, can_scan, has_kernels
from gradwire.reducer.hook.hook_states import HookStates
from gradwire.reducer.hook.runner import HookRunner


@dataclass(frozen=True, slots=True)
class Late:
    """The check of a step, which was enqueued on the device and not read by the host."""

    scan: Scan
    step: int
    hook: str
    states: HookStates


class LateChecks:
    """The checks of one model that are read late. See Note [A result that comes late]."""

    def __init__(self, specs: Sequence[ParameterSpec], policy: NonFinite) -> None:
        self._specs = specs
        self._policy = policy
        self._scans: list[Scan] = []
        self._broken = False
        self._pending: Late | None = None
        self._states: HookStates | None = None
        self._scannable: tuple[object, bool] = None, False
        """A hook, and whether the kernels can look at what it reduces."""
        self._uneven = False
        self._steps = 0
        """Since ranks have begun to ask each other."""
        self._agreed = False

    def begin(self, runner: HookRunner) -> Scan | None:
        """The scan for the step that begins; None if the host has to know the result before the optimizer's step."""
        if runner.states is not self._states or runner.uneven != self._uneven:
            self._states, self._uneven = runner.states, runner.uneven
            self._agreed, self._steps = False, 0
            runner.optimizers.forget_steps()
            return None
        self._steps += 1
        if not self._possible(runner) or not (self._agreed or self._agree(runner)) or not self._can_skip(runner):
            return None
        pending, device = self._pending, self._specs[0].device
        (scan, *_) = [scan for scan in self._scans if pending is None or scan is not pending.scan]
        if scan.dirty and device.type == "cuda":  # a step that has failed may still be at work on it
            torch.cuda.current_stream(device).wait_stream(runner.driver.side_stream(device))
        scan.begin()
        return scan

    def _possible(self, runner: HookRunner) -> bool:
        """Whether nothing speaks against it that is the same on all ranks."""
        first, hook = self._specs[0], runner.hook
        if runner.uneven or not on_device(first.device) or not runner.group.orders_streams(first.device):
            return False
        if self._scannable[0] is not hook:
            self._scannable = (
                hook,
                all(
                    spec.device == first.device and not spec.sparse and can_scan(spec.dtype, hook.narrowest(spec.dtype))
                    for spec in self._specs
                ),
            )
        return self._scannable[1]

    def _agree(self, runner: HookRunner) -> bool:
        """Whether all ranks can: they ask each other in the first, second, fourth, … step, until all can."""
        if self._steps & (self._steps - 1):
            return False
        device = self._specs[0].device
        able = self._prepare(runner) and self._can_skip(runner)
        self._agreed = not any_rank(not able, runner.group, device)
        return self._agreed

    def _can_skip(self, runner: HookRunner) -> bool:
        return self._policy is NonFinite.RECORD or runner.optimizers.can_skip()

    def _prepare(self, runner: HookRunner) -> bool:
        """Whether the kernels can be run here."""
        if self._scans or self._broken or not has_kernels():
            return bool(self._scans)
        names, device = [spec.name for spec in self._specs], self._specs[0].device
        on_stream = functools.partial(_on_stream_of_reductions, device, runner)
        scans = [Scan(names, device, on_stream) for _ in range(2)]
        try:
            scans[0].rehearse({spec.dtype for spec in self._specs})
        except Exception as error:  # whatever a compiler raises
            warnings.warn(
                "nonfinite: Triton cannot compile kernels that check gradients on the device, so the host waits for the device in "
                f"every step ({type(error).__name__}: {error}). Triton needs a C compiler.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._broken = True
            return False
        self._scans = scans
        return True

    def enqueue(
        self, scan: Scan, runner: HookRunner, narrow: Callable[[torch.dtype], torch.dtype | None], *, step: int
    ) -> None:
        """All reductions of a step are enqueued: have the device look at the averages."""
        scan.enqueue(narrow)
        self._pending = Late(scan, step, runner.name, runner.states)
        if self._policy is not NonFinite.RECORD:
            runner.optimizers.skip_next(scan.bad)

    @property
    def pending(self) -> bool:
        """Whether the check of the last step has not been read."""
        return self._pending is not None

    def take(self, runner: HookRunner) -> Late | None:
        """The check of the last step, if it has not been read. It is not pending any more, and nothing is skipped for it."""
        late, self._pending = self._pending, None
        return late if late is not None and late.states is runner.states else None


def on_device(device: torch.device) -> bool:
    """Whether the host would have to wait for this device."""
    return device.type == "cuda"


def _on_stream_of_reductions(device: torch.device, runner: HookRunner) -> contextlib.AbstractContextManager[object]:
    """Enqueue after what the current stream has, and before the next reduction."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    side = runner.driver.side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(side)

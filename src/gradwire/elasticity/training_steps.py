"""`TrainingSteps`: steps of one member that are committed or dropped.

Note [A step that may be lost]
A step changes gradients, the hook's states, buffers and random numbers before it is committed; parameters and the optimizer change
at the commit alone. So when a step begins, the hook's states are forked and the buffers copied, and a step that is dropped has both
as they were and no gradients. Random numbers need no copy: each slot of a step seeds them, so it is the same on any member, however
often it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.elasticity.device_vote import mark, wait_for
from gradwire.elasticity.machine import View
from gradwire.elasticity.state import SavedState, checksum
from gradwire.elasticity.stream import Joins
from gradwire.elasticity.trained_state import TrainedState
from gradwire.errors import UsageError
from gradwire.policies import Graph
from gradwire.recorder.format import RecordKind
from gradwire.reducer.checks.attached_optimizers import FoundInfOverride, allocates_momentum, can_skip_step
from gradwire.reducer.hook.hook_states import StepFork


@dataclass(frozen=True, slots=True)
class _Averaged:
    """A step whose commit is enqueued behind a vote of the device."""

    fork: StepFork
    gradients: list[Tensor | None]
    buffers: dict[str, Tensor]
    """As they were when it began."""
    options: list[dict[str, Any]]
    """Of the optimizer's groups, when it was enqueued."""


class TrainingSteps(TrainedState):
    """See Note [A step that may be lost]."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self.update: Callable[[], object] = optimizer.step
        """What a commit does with the averages."""
        self.slots: list[int] = []
        """Those that this member computes in the present view."""
        self.listeners: list[Callable[[View], object]] = []
        """Called when this member has entered a view."""
        self.begun_from: list[SavedState] = []
        """Until the first commit, what members saved in the run that this one continues, if the hook remembers or has rounds."""
        self._retried = False
        """Whether the last step was dropped, to be computed again."""
        self._fork: StepFork | None = None
        self._behind: _Averaged | None = None
        self._later: list[dict[str, Any]] = []
        """Options of the optimizer that were set after the present step was enqueued behind a gate that was closed."""
        self._buffers: dict[str, Tensor] = {}
        self._agreed = self._reduced = 0
        self._owes: dict[str, tuple[float, int]] = {}
        """The norm of what each member owed, and in which step."""
        self._updating = False
        self.failure = ""
        """What `update` has raised, so that this member has not committed what the others have."""
        self.joins = Joins(self.replica, self._rest, self._arrive, self._update)
        self.joins.allowed = self.data is not None
        self._step_hook = optimizer.register_step_pre_hook(self._before_update)

    def warm_up(self, compute: Callable[[], object]) -> None:
        """Call it, and drop what it has computed: what compiles in it does so before others wait for this member."""
        buffers = self.replica.state.copied_buffers()
        try:
            with self.replica.no_sync():
                compute()
        finally:
            self.replica.reducer.abandon("it was a warm-up")
            self.clear_gradients()
            self.replica.state.restore_buffers(buffers)

    def open(self) -> None:
        """See Note [A step that may be lost]."""
        self.clear_gradients()
        self.replica.reducer.iterations.number = self.opened  # in records, a step has the same number on all ranks
        if self._behind is None:  # else when it is known whether the states are those of the last step
            self._fork = self.replica.runner.states.fork()
        self._reduced = self.replica.reducer.steps
        self._buffers = self.replica.state.copied_buffers()

    @property
    def opened(self) -> int:
        """The number of the present step: one more than is committed while it is not known whether the last one was."""
        return self.committed + (self._behind is not None)

    @property
    def steps_committed(self) -> int:
        """How many steps of the optimizer are known to be committed."""
        return self.committed

    @property
    def averaged(self) -> int:
        """How many times gradients were averaged in the step: once, when this member has the average of every bucket."""
        return self.replica.reducer.steps - self._reduced

    @property
    def added_later(self) -> bool:
        """Whether gradients were added to the averages of the step."""
        self.replica.reducer.catch_up()
        return self.replica.reducer.late > self._reduced

    @property
    def begun(self) -> bool:
        """Whether slots of the step were computed, and have changed buffers."""
        computed, here = any(p.grad is not None for p in self._parameters), self.replica.state.named_buffers()
        return computed and any(checksum(here[name]) != checksum(before) for name, before in self._buffers.items())

    @property
    def gate(self) -> torch.device | None:
        """The device that may vote: nothing but the optimizer depends on the vote, and it can be told by the device. Else None."""
        device = self.replica.parameters[0].device
        if device.type != "cuda" or any(p.device != device for p in self.replica.parameters):
            return None
        hooks = len(self.optimizer._optimizer_step_pre_hooks) > 1 or self.optimizer._optimizer_step_post_hooks
        plain = self.update == self.optimizer.step and not (hooks or self.registered) and self.data is not None
        ordered = self.replica.graph is Graph.ALL_USED and self.group.orders_streams(device)
        skips = can_skip_step(self.optimizer) and not allocates_momentum(self.optimizer)
        return device if plain and ordered and skips else None

    def wait_for_averages(self, lost: Callable[[], bool]) -> None:
        """Where operations only order streams, wait until the device has all averages."""
        device = self.replica.parameters[0].device
        if self.group.orders_streams(device):
            wait_for(mark(device), lost, self.group.timeout, f"averages of step {self.opened} of {self.group}")

    @property
    def settings(self) -> list[float]:
        """Numbers of the optimizer, such as its rate, which are equal on all members."""
        groups = self.optimizer.param_groups
        return [float(v) for group in groups for _, v in sorted(group.items()) if isinstance(v, int | float)]

    @property
    def _in_step(self) -> bool:
        return (self._fork or self._behind) is not None

    def _before_update(self, *_: object) -> None:
        if self._in_step and not self._updating:
            raise UsageError(
                f"optimizer.step() in step {self.opened} of a run: it would change parameters before the members have voted. "
                "Call commit() instead, which calls it, or the update= that you pass to gw.elastic."
            )

    def commit(self) -> None:
        """Step the optimizer with the averages, unless the device has done that already."""
        behind, self._behind = self._behind, None
        if behind is None and not self.joins.keep():
            self._update()
            self._use(self._later)
        self.begun_from = []
        fork = self._end() if behind is None else behind.fork
        assert fork is not None
        fork.commit()
        if behind is not None:
            self._fork = self.replica.runner.states.fork()  # of the step that has begun
        self.replica.reducer.events.record(RecordKind.STEP_COMMITTED, self.committed)
        self.committed += 1

    def _update(self, step: int | None = None) -> None:
        """Commit the averages, as those of an earlier step if one is given."""
        now, sync, self._updating = self.committed, self.replica.sync, True
        self.committed, self.replica.sync = now if step is None else step, False  # of a closure with a backward
        try:
            self.update()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}" if step is None else ""
            raise
        finally:
            self.committed, self.replica.sync, self._updating = now, sync, False

    def commit_behind(self, closed: Tensor) -> None:
        """Step the optimizer unless this flag on the device is 1, and begin the next step. `commit` follows when it was not."""
        fork, self._fork = self._fork, None
        assert fork is not None
        self._behind = _Averaged(fork, [p.grad for p in self._parameters], self._buffers, self._options())
        FoundInfOverride.add(self.optimizer, self, closed)
        try:
            self._update()
        finally:
            FoundInfOverride.restore(self.optimizer, self)
        self.replica.reducer.abandon("the step has ended")
        self.open()

    def reopen(self) -> None:
        """The gate was closed: have the averages again, and forget what was begun after them."""
        behind, self._behind = self._behind, None
        if behind is None:
            return
        self.replica.runner.driver.drain(self.group.timeout)
        self.replica.reducer.abandon("the vote on the step before has failed")
        self.replica.state.restore_buffers(self._buffers)
        self._fork, self._buffers, self._later = behind.fork, behind.buffers, self._options()
        self._use(behind.options)
        for parameter, gradient in zip(self._parameters, behind.gradients, strict=True):
            parameter.grad = gradient

    def drop(self) -> None:
        """Have everything as it was when the step began."""
        self.replica.runner.driver.drain(self.group.timeout)
        fork = self._end()
        if fork is None:
            return  # the step before was committed, and none has begun
        fork.drop()
        self._retried = True
        self.replica.state.restore_buffers(self._buffers)

    def restart(self) -> None:
        """What was computed since the step has begun does not count."""
        self.drop()
        self._retried = False
        self.open()

    def _end(self) -> StepFork | None:
        fork, self._fork, self._later = self._fork, None, []
        self._reduced = self.replica.reducer.steps
        self.replica.reducer.abandon("the step has ended")
        self.clear_gradients()
        return fork

    def clear_gradients(self) -> None:
        """What was computed so far is not averaged."""
        for parameter in self._parameters:
            parameter.grad = None
        self.replica.reducer.used.seen.clear()
        self.replica.reducer.iterations.halfway = None

    def _options(self) -> list[dict[str, Any]]:
        groups = [{k: v for k, v in one.items() if k != "params"} for one in self.optimizer.param_groups]
        return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in one.items()} for one in groups]

    def _use(self, options: list[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, options, strict=False):
            group.update(values)

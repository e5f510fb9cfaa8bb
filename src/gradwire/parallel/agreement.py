"""`Agreement`: what the ranks of a model tell each other before a step: whether to skip it, and how to share its batch.

Note [A group of its own]
A rank may forget to take part and begin its backward. In the model's group the message of the others would then meet its first
bucket, and gloo crashes on different sizes. So agreements use a group of their own with the same ranks, which the first of them
makes, and all their messages are equally long and state their subject and step. A rank that fails its step aborts the model's group
only, so a rank that waits here watches that one too. After a recovery a new group is made, because ranks may have left the old one
at different messages. Where a group cannot be split (NCCL without an engine for CPU tensors), messages take turns in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from gradwire.collectives import all_gather_into_tensor
from gradwire.errors import CollectiveTimeout, GroupError, PeerLost, UsageError
from gradwire.groups.base import Group
from gradwire.parallel.recovery import Recovery
from gradwire.recorder.source import derived_id
from gradwire.reducer import Reducer
from gradwire.reducer.machine import State
from gradwire.runtime.threads import BoundedCall, weakly

SKIP, BALANCE = "agree_to_skip", "Balance.batch_size"
_SUBJECTS = (SKIP, BALANCE)
_VALUES = 3
_SLICE = 0.1
"""Seconds between two looks at the model's group while this rank waits."""
_PART = 0.8
"""Of the group's timeout: a rank that does not take part is named before its reductions, which wait for the others, name those."""


class Agreement:
    """One rank's part in the agreements of one model."""

    def __init__(self, reducer: Reducer, recovery: Recovery) -> None:
        self._reducer = reducer
        self._recovery = recovery
        self._own: Group | None = None
        self._leave: Callable[[], object] = lambda: None
        self._made_for: tuple[Group, int] | None = None
        """The model's group, and how often it had recovered, when `_own` was made."""
        self._skip: tuple[int, bool] | None = None
        """The iteration of the last `agree_to_skip`, and its result."""
        self._before_forward = False
        """Whether it was called before the forward whose backward is averaged."""
        self.dropped = False
        """Whether ranks have agreed to skip a batch, and there was no forward since."""

    def agree_to_skip(self, flag: bool) -> bool:
        """Whether any rank passes True: see `HookControls.agree_to_skip`."""
        reducer = self._reducer
        step, rank = reducer.iterations.begins, reducer.group.rank
        if torch._C._current_graph_task_id() != -1:
            raise UsageError(f"{SKIP} on rank {rank} during backward: it is too late to skip. Call it before backward.")
        if self._skip == (step, False):
            self.refuse(
                f"{SKIP} on rank {rank} for the second time in step {step}, in which all ranks have agreed to go on. Call it once "
                "for each averaged step: before the last backward if gradients are accumulated."
            )
        self._before_forward = reducer.machine.state is State.RESTING
        skip = any(row[0] for row in self.exchange(SKIP, float(bool(flag))))
        self._skip = reducer.iterations.begins, skip
        reducer.check_agreed = weakly(self._check_called)
        if skip:
            reducer.abandon("all ranks skip it")
        self.dropped = skip
        return skip

    def before_forward(self, *, averaged: bool) -> None:
        """Raise if `agree_to_skip` was called before the forward of an earlier step, and not before this one, whose backward is
        `averaged`: ranks exchange buffers in a forward, and those that have called would not take part."""
        self.dropped = self.dropped and not torch.is_grad_enabled()
        if averaged and self._before_forward and torch.is_grad_enabled():
            try:
                self._check_called(True, "forward", self._reducer.iterations.begins)
            except UsageError as error:
                self.fail(error)
                raise

    def _check_called(self, averaged: bool, what: str = "backward", step: int | None = None) -> None:
        """All ranks must have agreed on a backward that is averaged, and there must be none of outputs that were dropped."""
        step = self._reducer.iterations.number if step is None else step
        if self._skip == (step, False) or not (averaged or self.dropped):
            return
        skipped = self._skip == (step, True)
        called = "returned True, and was not called again" if skipped else "was not called"
        raise UsageError(
            f"{what} of step {step} on rank {self._reducer.group.rank}: {SKIP} {called} before it. Once it is used, call it on "
            "every rank at the same point of each averaged step, and skip the batch if it returns True."
        )

    def recover(self) -> None:
        """If a step has failed, recover from it with all ranks, or raise its failure."""
        with self._recovery.failing_forward():
            self._recovery.recover_if_failed()

    def fail(self, error: BaseException) -> None:
        """A call that every rank makes before a step has failed: fail the step on all ranks."""
        iterations = self._reducer.iterations
        (iterations.fail if iterations.expects_backward else iterations.fail_forward)(error)

    def refuse(self, text: str) -> NoReturn:
        """Raise UsageError, and fail the step on all ranks."""
        error = UsageError(text)
        self.fail(error)
        raise error

    def exchange(self, subject: str, *values: float) -> list[list[float]]:
        """The values of all ranks, in rank order. Every rank calls it before the same step."""
        while True:
            self.recover()
            rank, step = self._reducer.group.rank, self._reducer.iterations.begins
            try:
                rows = self._gather(subject, step, values)
                break
            except BaseException as error:
                if not isinstance(error, GroupError) or self._reducer.group.failure is None:
                    self.fail(error)
                    raise
                # Else it is of a step that this rank has finished, or `recover` raises it.
        others = [(r, row) for r, row in enumerate(rows) if row[:2] != rows[rank][:2]]
        if others:
            calls = ", ".join(f"rank {r} called {_SUBJECTS[int(row[0])]} in step {int(row[1])}" for r, row in others)
            self.refuse(
                f"{subject} on rank {rank} in step {step}: {calls}. Call them in the same order on every rank, before each step."
            )
        return [row[2:] for row in rows]

    def _gather(self, subject: str, step: int, values: tuple[float, ...]) -> list[list[float]]:
        group = self._reducer.group
        message = [float(_SUBJECTS.index(subject)), float(step), *values, *[0.0] * (_VALUES - len(values))]
        if group.size == 1:
            return [message]
        limit = _PART * group.timeout
        try:
            own = self._group(group, limit)
            own.set_timeout(limit)
            device = torch.device("cpu") if own is not group else self._reducer.device
            mine = torch.tensor(message, dtype=torch.float64, device=device)
            rows = mine.new_empty(group.size * mine.numel())
            work = own.submit(all_gather_into_tensor(rows, mine, label=subject))
            own.ledger.waited(work)
            while not work.wait_settled(_SLICE):
                group.check_peers()
            work.wait()
        except (CollectiveTimeout, PeerLost) as error:
            doing = f"{subject} on rank {group.rank} in step {step}"
            advice = "Call it on every rank before the same step, and look at their output for an exception."
            if isinstance(error, PeerLost) and error.rank is not None:
                raise PeerLost(f"{doing}: rank {error.rank} has left without it. {advice}", rank=error.rank) from error
            if isinstance(error, CollectiveTimeout) and error.missing:
                text = f"{doing}: ranks {list(error.missing)} did not call it within {limit:.3g} s. {advice}"
                raise CollectiveTimeout(text, joined=error.joined, missing=error.missing) from error
            raise
        gathered: list[list[float]] = rows.view(group.size, -1).tolist()
        return gathered

    def _group(self, group: Group, limit: float) -> Group:
        """See Note [A group of its own]."""
        made_for = group, group.ledger.recoveries
        if self._own is not None and self._made_for == made_for:
            return self._own
        self._leave()
        number = self._reducer.events.model, group.ledger.recoveries
        name = f"{group.name}/agreements-{number[0]}.{number[1]}"
        before, group.timeout = group.timeout, limit  # which the new group takes over
        call = BoundedCall(lambda: group.subgroup(list(range(group.size)), name=name), name="gradwire-agreements")
        try:
            while not call.wait(_SLICE):
                group.check_peers()
        except BaseException:
            call.abandon()
            raise
        finally:
            group.timeout = before
        try:
            self._own = call.result()
            self._leave = weakref.finalize(self, self._own.close, 0.0)  # so that the others can name this rank
            self._own.ledger.identify(derived_id(group.ledger.events.group_id, "agreements", *number))
        except UsageError:
            self._own = group
        self._made_for = made_for
        return self._own


def refuse_join(model: Any, subject: str, rank: int) -> None:
    """Raise under `join()`: a rank that has run out of inputs takes part in collectives of steps only."""
    config = getattr(model, "_join_config", None)
    if config is not None and config.enable:
        raise UsageError(
            f"{subject} on rank {rank} under join(): a rank that has run out of inputs cannot answer. Give every rank the same "
            "number of steps, without join()."
        )

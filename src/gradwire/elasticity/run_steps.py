"""`RunSteps`: how a run votes on its steps, or its rounds, and what it does when members are lost meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from gradwire.elasticity.machine import View
from gradwire.elasticity.outer import OuterTraining
from gradwire.elasticity.performer import Performer
from gradwire.elasticity.state import pack, save
from gradwire.elasticity.training import Training
from gradwire.errors import CollectiveMismatch, GroupError, TooFewMembers, UsageError
from gradwire.groups.base import Group


class RunSteps:
    """The steps of one process in one run."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.steps: int | None = None
        """After how many steps the loop ends."""
        self.check_every = 100
        """After how many steps members compare their parameters."""
        self.rescue: str | os.PathLike[str] | None = None
        """Where the state is saved when too few members are left."""
        self.changed = 0
        """How often members have changed outside of `commit`: a step that had begun then is over."""
        self.finished = False
        """Whether training has ended here, for whatever reason but that this process leaves."""
        self._leaving = False
        self._performer: Performer | None = None
        training.replica.reducer.iterations.survive = self._survive

    @property
    def performer(self) -> Performer:
        assert self._performer is not None, "start() comes first"
        return self._performer

    @property
    def view(self) -> View:
        """The members, in rank order, and since which step."""
        return self.performer.view

    @property
    def group(self) -> Group:
        """The group of the present view's members, but for those that receive the state. Another one replaces it when members
        change."""
        return self.training.joins.group or self.training.group

    @property
    def left(self) -> bool:
        """Whether this process has left the run, or came when training had ended."""
        return self._performer is not None and self._performer.left is not None

    @property
    def done(self) -> bool:
        return self.left or self.finished or (self.steps is not None and self.training.opened >= self.steps)

    def _check_step(self, number: int) -> None:
        """Refuse to commit what is not the average of all."""
        training, what = self.training, f"commit() of step {number}"
        if self.done:
            raise UsageError(f"{what}: the run has ended. Loop while not run.done, or choose more steps=.")
        if training.failure:
            raise UsageError(
                f"commit() after step {number}, in which update= has raised {training.failure}: this member has not committed what "
                "the others have. Let the error end the process; another one may take its place."
            )
        iterations = training.replica.reducer.iterations
        if iterations.failure or iterations.halfway:
            raise UsageError(
                f"{what}: a backward of it has failed here ({iterations.last_error}), and others wait for its gradients. Let the "
                "error end the process; another one may take its place."
            )
        if training.retries and self.performer.frozen:
            return
        if not training.averaged:
            raise UsageError(
                f"{what}: no gradients were averaged in it. Call backward() for every batch of the step first, and commit() once. "
                "If it does not use all parameters, pass graph=gw.policies.Graph.FIND_UNUSED."
            )
        if training.averaged > 1 or training.added_later:
            raise UsageError(
                f"{what}: backward() has run again after its gradients were averaged. Call it once for each batch, for the sum of "
                "all losses, before you take the next batch; call commit() after the last."
            )
        if (name := training.unaveraged) is not None:
            raise UsageError(
                f"{what}: {name} has a gradient that is not averaged, since it required none when the run was made. Let it "
                "require one before gw.elastic(), in an optimizer's group with lr=0 until it is to be trained."
            )

    def _vote(self, number: int) -> None:
        performer = self.performer
        checked = bool(self.check_every and number % self.check_every == 0)
        compared = checked or number == self.view.step or number + 1 == self.steps
        due = compared or self.training.joins.streams
        by_hosts = due or performer.change_voted
        gate = None if by_hosts else self.training.gate
        idle = self.view.fresh if self.training.joins.streams else ()
        first = next(rank for rank, member in enumerate(self.view.members) if member not in idle)
        if not performer.frozen:
            try:
                self.training.replica.state.sync_buffers(first)  # all have those of the first that computes at a commit
                if gate is None:
                    self.training.wait_for_averages(performer.check_group)
                if compared:
                    self.training.compare_owed()
            except GroupError as error:
                if not self._survive(error):
                    raise
            else:
                performer.vote(self.training.facts(self.view, digests=due), gate)
        performer.settle()

    def _end_round(self, *, now: bool = False) -> None:
        """If this member is at the end of a round, commit it; if members change, follow. `now`: the round ends here."""
        training, performer = self.training, self.performer
        if not isinstance(training, OuterTraining):
            return
        training.ending = training.ending or (now and training.moved)
        if training.ending and training.moved:
            performer.quorum.arrived = training.committed
        if performer.leaving and training.may_leave and not training.ending:
            performer.lost()
        while True:
            if training.ending and not performer.frozen:
                try:
                    training.outer_step()
                    training.wait_for_averages(performer.check_group)
                    training.compare_owed()
                except GroupError as error:
                    if not self._survive(error):
                        raise
                else:
                    performer.vote(training.facts(performer.view, digests=True))
            performer.settle()
            if self.left or not training.ending:
                return

    @contextlib.contextmanager
    def _rescuing(self) -> Iterator[None]:
        try:
            yield
        except TooFewMembers as error:
            if self.rescue is None:
                error.add_note("The state is not saved. To have it saved, pass rescue=FILE to gw.elastic.")
            elif self.performer.member.holds:
                error.add_note(self._rescue(os.fspath(self.rescue)))
            raise

    def _rescue(self, path: str) -> str:
        """Save the state, of a hook that remembers into a file for each rank. Returns what has become of it."""
        rank = self.view.members.index(self.performer.member.me)
        file, given = path, repr(path)
        if self.training.remembers:
            file, given = f"{path}-{rank}", f"glob.glob({path + '-*'!r})"
        try:
            self._know()
            save(self.saved_state(rank, rescued=True), Path(file))
        except Exception as why:
            return (
                f"The state after step {self.training.opened} could not be saved in {file}: {type(why).__name__}: {why}"
            )
        return f"The state after step {self.training.opened} is saved: gw.elastic(state={given})."

    def _survive(self, error: GroupError) -> bool:
        mismatch = isinstance(error, CollectiveMismatch)
        if not mismatch:
            self.performer.lost()
        first = self.view.step == self.training.committed  # then the others may have left the loop by break
        return (first and self.performer.come_too_late(if_ended=True)) or not mismatch

    def _know(self) -> None:
        """Wait until it is known whether the last step was committed."""
        if self._performer is not None and self._performer.pending:
            self._performer.resolve()
            if self._performer.pending:  # it was not
                with self._rescuing():
                    self._performer.settle()
                self.changed += 1
                self.training.replica.sync = False  # of what is computed now, nothing counts: see `ElasticStep.commit`
                if not self.left:
                    self.training.open()

    def saved_state(self, rank: int, *, rescued: bool) -> dict[str, Any]:
        training = self.training
        digest = training.digest if training.opened == training.steps_committed else 0  # in a round members differ
        saved = {"rank": rank, "size": self.group.size, "rescued": rescued, "digest": digest}
        state, tensors = {**training.state_dict(), "saved": saved}, list[Tensor]()
        model, rest = state.pop("model"), json.dumps(pack(state, tensors))
        return {"model": model, "run": rest, "tensors": {str(number): one for number, one in enumerate(tensors)}}

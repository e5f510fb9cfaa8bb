"""`ElasticRun`: a training loop that goes on while members die, leave and join. See `gw.elastic`.

A member whose group fails in backward notices nothing there: its loop goes on to `commit`, which changes the members and drops the
step, or commits it after all, and the loop computes what comes next.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.collectives import barrier
from gradwire.elasticity.deal import Deal, fixed_hash, seed_generators
from gradwire.elasticity.machine import View
from gradwire.elasticity.outer import OuterTraining, end_round
from gradwire.elasticity.performer import Build, Limits, Performer
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.saved_states import Source, find_states
from gradwire.elasticity.state import pack, save
from gradwire.elasticity.training import Training
from gradwire.errors import CollectiveMismatch, GroupError, TooFewMembers, UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook
from gradwire.hooks.periodic.base import OuterHook
from gradwire.policies import Buckets, Graph

_END = 10.0
"""Seconds for which a member waits for the others when training has ended."""


class ElasticRun:
    """One process in one run. Iterate over it: each iteration is one step, or the same one again if members were lost in it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        hook: CommHook | None = None,
        data: Deal | None = None,
        graph: Graph = Graph.ALL_USED,
        buckets: Buckets | None = None,
    ) -> None:
        for name, value, kind in (("model", model, nn.Module), ("optimizer", optimizer, torch.optim.Optimizer)):
            if not isinstance(value, kind):
                raise UsageTypeError(f"gw.elastic({name}={value!r}): pass an object of {kind.__name__}.")
        if data is not None and not isinstance(data, Deal):
            raise UsageTypeError(
                f"gw.elastic(data={type(data).__name__}): members read parts of each batch. Pass gw.Deal(dataset, ...)."
            )
        ours = set(model.parameters())
        others = sum(p not in ours for group in optimizer.param_groups for p in group["params"])
        if others:
            raise UsageError(
                f"gw.elastic(): the optimizer has {others} parameters that are not the model's, whose gradients nobody would "
                "average. Make them part of the model, e.g. of an nn.ModuleList with the loss in it."
            )
        if graph is Graph.STATIC:
            raise UsageError(
                "gw.elastic(graph=Graph.STATIC): members that join have not seen the graph that the others have learned. Choose "
                "policies.Graph.ALL_USED or FIND_UNUSED."
            )
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self.steps: int | None = None
        """After how many steps the loop ends."""
        self.check_every = 100
        """After how many steps members compare their parameters."""
        self.rescue: str | os.PathLike[str] | None = None
        """Where the state is saved when too few members are left."""
        made = OuterTraining if isinstance(hook, OuterHook) else Training
        self.training: Training = made(model, optimizer, hook=hook, data=data, graph=graph, buckets=buckets)
        self.training.entered = self._entered
        self.training.replica.reducer.iterations.survive = self._survive
        self.training.replica.reducer.iterations.before_backward = self._resolve
        self._performer: Performer | None = None
        self.changed = 0
        """How often members have changed outside of `commit`: a step that had begun then is over."""
        self.finished = self._leaving = False
        """Whether training has ended here, for whatever reason but that this process leaves."""
        self._listeners: list[Callable[[View], object]] = []

    def start(self, me: str, connect: Callable[[], RunRecords], build: Build, limits: Limits) -> ElasticRun:
        """Join the run: returns when this process is a member, with the state of the others."""
        like = torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)])
        like.load_state_dict(like.state_dict())  # the first call imports much, and others would wait
        self._performer = Performer(me, connect, build, self.training, limits)
        if self._leaving:
            self._performer.leave()
        self._performer.join(self.training.committed)
        if not self.left:
            self._end_round()
            self.training.open()
        while not self.done and self.training.joins.lag is not None:
            self._catch_up()
        if not self.left and self.training.joins.lag is not None:
            self._performer.come_too_late()
        return self

    def _catch_up(self) -> None:
        """A step of a member that receives the state: see Note [Stream] in `stream.py`."""
        try:
            if self.training.catch_up(lambda: self.performer.check_group() or self._leaving):
                self.performer.received()
        except GroupError as error:
            if not self._survive(error):
                raise
        self.commit()

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
        return self.training.computing

    @property
    def left(self) -> bool:
        """Whether this process has left the run, or came when training had ended."""
        return self._performer is not None and self._performer.left is not None

    def leave(self) -> None:
        """Leave after the present step: what this member owes goes to another one. May be called in a signal handler."""
        self._leaving = True
        if self._performer is not None:
            self._performer.leave()

    def on_view(self, fn: Callable[[View], object]) -> Handle:
        """Call `fn(view)` when members have changed, and once now if this process is a member."""
        self._listeners.append(fn)
        if not self.left:
            fn(self.view)
        return Handle(lambda: self._listeners.remove(fn))

    def _entered(self, view: View) -> None:
        for fn in list(self._listeners):
            fn(view)

    def close(self) -> None:
        """End training, on all members: each calls it after the same step. A no-op if it is closed."""
        try:
            self._finish()
        finally:
            self.release()

    def release(self) -> None:
        self.finished = self.finished or not self.left
        if self._performer is not None:
            self._performer.close()
        self.training.detach()

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error the others go on, and a process in place of this one may join them."""
        (self.close if kind is None else self.release)()

    @property
    def committed(self) -> int:
        """How many steps have been committed; of a hook with rounds, in whole rounds. Waits for the device where that votes."""
        self._know()
        return self.training.steps_committed

    @property
    def done(self) -> bool:
        return self.left or self.finished or (self.steps is not None and self.training.opened >= self.steps)

    def __iter__(self) -> Iterator[ElasticStep]:
        while not self.done:
            step = ElasticStep(self)
            yield step
            if not step.ended and not self.left:
                raise UsageError(
                    f"step {step.number} of the run ended without commit(). Call it at the end of every iteration."
                )
        self._finish()

    def _finish(self) -> None:
        """Training has ended: nobody goes before all have the last step, and nobody is replaced or joins any more."""
        if self.finished or self._performer is None:
            return
        opened = self.training.opened
        self._know()
        if self.left:
            return
        if self.training.opened < opened:
            raise UsageError(
                f"end of training after step {opened - 1}: the device has not committed it, because members were lost. Pass steps= "
                "to gw.elastic, or ask run.committed before you end the loop."
            )
        self._end_round(now=True)
        if self.left:
            return
        self.finished = True
        with contextlib.suppress(GroupError):
            self.group.submit(barrier(label="the end of training").within(_END)).wait()
        self._performer.end()

    def commit(self) -> bool:
        """Vote on the step, and step the optimizer; False if it is to be computed again. See `ElasticStep.commit`."""
        if self.left:
            return False
        number, performer = self.training.opened, self.performer
        performer.resolve()
        if self.done:
            raise UsageError(
                f"commit() of step {number}: the run has ended. Loop while not run.done, or choose more steps=."
            )
        if not (self.training.retries and performer.frozen):
            if not self.training.averaged:
                raise UsageError(
                    f"commit() of step {number}: no gradients were averaged in it. Call backward() for every batch of the step "
                    "first. If it does not use all parameters, pass graph=Graph.FIND_UNUSED to gw.elastic."
                )
            if self.training.averaged > 1:
                raise UsageError(
                    f"commit() of step {number}: gradients were averaged {self.training.averaged} times in it. Take the next batch "
                    "only after the backward of the one before; call commit() after the last."
                )
        with self._rescuing():
            if isinstance(self.training, OuterTraining):
                self.training.step(limit=self.steps, late=performer.quorum.late(self.training.committed))
                self._end_round()
            else:
                self._vote(number)
        if not self.done and not performer.pending:
            self.training.open()
        return self.training.opened > number

    def _vote(self, number: int) -> None:
        performer = self.performer
        checked = bool(self.check_every and number % self.check_every == 0)
        due = number == self.view.step or self.training.joins.streams or checked
        by_hosts = due or performer.change_voted or number + 1 == self.steps
        gate = None if by_hosts else self.training.gate
        if not performer.frozen and self._share_buffers(wait=gate is None):
            performer.vote(self.training.facts(self.view, digests=due), gate)
        performer.settle()

    def _end_round(self, *, now: bool = False) -> None:
        if isinstance(self.training, OuterTraining):
            end_round(self.training, self.performer, self._survive, now=now)

    def step(self) -> bool:
        """For a loop of your own: call it after `backward()`, in place of `optimizer.step()`. False: nothing was changed, because
        members were lost; compute the same batch again."""
        return self.commit()

    @contextlib.contextmanager
    def _rescuing(self) -> Iterator[None]:
        try:
            yield
        except TooFewMembers as error:
            if self.rescue is not None and self.performer.member.holds:
                _rescue(self, error, self.rescue)
            raise

    def _survive(self, error: GroupError) -> bool:
        if isinstance(error, CollectiveMismatch):
            return False
        self.performer.lost()
        return True

    def _resolve(self) -> None:
        if self._performer is not None:
            self._performer.resolve()

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

    def _share_buffers(self, *, wait: bool) -> bool:
        """All members have those of the first one at a commit. `wait`: until they and the averages are there."""
        try:
            self.training.replica.state.sync_buffers()
            if wait:
                self.training.wait_for_averages(self.performer.check_group)
        except GroupError as error:
            if not self._survive(error):
                raise
            return False
        return True

    def register(self, **objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` that belong to the run: they travel to members that join."""
        _refuse_after_start(self._performer, "register", "register=")
        for name, one in objects.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise UsageTypeError(
                    f"register {name}={one!r}: it has no state_dict and load_state_dict. Pass one that has."
                )
        self.training.registered |= objects

    def state_dict(self) -> dict[str, Any]:
        """Everything that a run needs to go on from the last committed step, but what other ranks owe: pass it, or a list of those
        of all, to `gw.elastic(state=...)`. All but the model's is JSON and tensors, which any checkpoint keeps as they are."""
        self._know()
        if self.committed < self.training.opened and self.group.size > 1:
            raise UsageError(
                f"the state after step {self.training.opened}: in a round of {self.training.replica.hook!r} members differ. "
                "Save it after the last step of a round, when run.committed > step.number."
            )
        return self._state(self.group.rank, rescued=False)

    def _state(self, rank: int, *, rescued: bool) -> dict[str, Any]:
        training = self.training
        digest = training.digest if training.opened == training.steps_committed else 0  # in a round members differ
        saved = {"rank": rank, "size": self.group.size, "rescued": rescued, "digest": digest}
        state, tensors = {**training.state_dict(), "saved": saved}, list[Tensor]()
        model, rest = state.pop("model"), json.dumps(pack(state, tensors))
        return {"model": model, "run": rest, "tensors": {str(number): one for number, one in enumerate(tensors)}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` into a safetensors file, completely or not at all: pass it to `gw.elastic(state=path)`."""
        save(self.state_dict(), Path(path))

    def load_state_dict(self, state: Source | Iterable[Source]) -> None:
        """Begin with this state, or file of `save`, or a list of those of all ranks, if nobody else has begun the run."""
        _refuse_after_start(self._performer, "load_state_dict", "state=")
        states = find_states(state, remembers=self.training.remembers)
        self.training.load_state_dict(states[0].read())
        self.training.begun_from = states if self.training.remembers else []


class ElasticStep:
    """One step of a run, on one member. Iterate over it: one batch for each of the member's slots."""

    def __init__(self, run: ElasticRun) -> None:
        self.number = run.training.opened
        self.ended = False
        """Whether `commit` was called."""
        self.committed = False
        self._run, self._changed = run, run.changed
        self._pause()

    def __iter__(self) -> Iterator[Any]:
        run, slots = self._run, self._run.training.slots
        if run.data is None:
            raise UsageError(
                f"the batches of step {self.number}: the run has no data. Pass data=gw.Deal(...) to gw.elastic."
            )
        for slot in slots:
            if run.changed > self._changed or (run.training.retries and run.performer.frozen):
                return  # it is computed again, or by others
            run.training.replica.sync = slot == slots[-1]
            seed_generators(fixed_hash(run.data.seed, self.number, slot))
            yield run.data.batch(self.number, slot)

    def commit(self) -> bool:
        """Vote, and step the optimizer when all members have all averages. If members were lost, there is another view when it
        returns; False: the step is computed again in that one, in the next iteration. So it may be after True of the device."""
        self.ended, run = True, self._run
        if run.changed == self._changed:
            self.committed = run.commit()
        elif not run.left:
            run.training.restart()
        self._pause()
        return self.committed

    def _pause(self) -> None:
        """Average nothing before the next batch, as in an evaluation."""
        self._run.training.replica.sync = self._run.data is None


def _refuse_after_start(performer: Performer | None, method: str, instead: str) -> None:
    if performer is not None:
        raise UsageError(
            f"{method}() of a run that has begun: the state of the others has been received. Pass {instead} to gw.elastic."
        )


def _rescue(run: ElasticRun, error: TooFewMembers, path: str | os.PathLike[str]) -> None:
    """Save the state, of a hook that remembers into a file for each rank."""
    rank, path = run.view.members.index(run.performer.member.me), os.fspath(path)
    file, given = path, repr(path)
    if run.training.remembers:
        file, given = f"{path}-{rank}", f"glob.glob({path + '-*'!r})"
    try:
        run._know()
        save(run._state(rank, rescued=True), Path(file))
    except Exception as why:
        error.add_note(
            f"The state after step {run.training.opened} could not be saved in {file}: {type(why).__name__}: {why}"
        )
    else:
        error.add_note(f"The state after step {run.training.opened} is saved: gw.elastic(state={given}).")

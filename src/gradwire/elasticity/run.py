"""`ElasticRun`: a training loop that goes on while members die, leave and join. See `gw.elastic`.

A member whose group fails in backward notices nothing there: its loop goes on to `commit`, which changes the members and drops the
step, or commits it after all, and the loop computes what comes next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire.collectives import barrier
from gradwire.elasticity.deal import Deal, fixed_hash, seed_generators
from gradwire.elasticity.machine import View
from gradwire.elasticity.outer import OuterTraining
from gradwire.elasticity.performer import Build, Performer
from gradwire.elasticity.quorum import Limits
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.run_steps import RunSteps
from gradwire.elasticity.state import Source, find_states, pack, save
from gradwire.elasticity.training import Training
from gradwire.errors import GroupError, UsageError, UsageTypeError
from gradwire.events import Handle
from gradwire.hooks.base import CommHook
from gradwire.hooks.periodic.base import OuterHook
from gradwire.policies import Buckets, Graph

_END = 10.0
"""Seconds for which a member waits for the others when training has ended."""


class ElasticRun(RunSteps):
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
        made = OuterTraining if isinstance(hook, OuterHook) else Training
        super().__init__(made(model, optimizer, hook=hook, data=data, graph=graph, buckets=buckets))
        self.model = model
        self.optimizer = optimizer
        self.data = data
        self._process = os.getpid()

    def start(self, me: str, connect: Callable[[], RunRecords], build: Build, limits: Limits) -> ElasticRun:
        """Join the run: returns when this process is a member, with the state of the others."""
        like = torch.optim.SGD([torch.zeros(1, device="cpu", requires_grad=True)])
        like.load_state_dict(like.state_dict())  # the first call imports much, and others would wait
        self._performer = Performer(me, connect, build, self.training, limits)
        self.training.replica.reducer.iterations.before_backward = self._performer.resolve
        self.training.script["steps= or check_every="] = [self.steps, self.check_every]
        if self._leaving:
            self._performer.leave()
        self._performer.join(self.training.committed)
        if not self.left:
            self._end_round()
            self.training.open()
        while not self.done and self.training.joins.lag is not None:  # see Note [Stream] in `stream.py`
            try:
                if self.training.catch_up(lambda: self.performer.check_group() or self._leaving):
                    self._performer.received()
            except GroupError as error:
                if not self._survive(error):
                    raise
            self.commit()
        if not self.left and self.training.joins.lag is not None:
            self._performer.come_too_late()
        return self

    def leave(self) -> None:
        """Leave after the present step: what this member owes goes to another one. May be called in a signal handler."""
        self._leaving = True
        if self._performer is not None:
            self._performer.leave()

    def on_view(self, fn: Callable[[View], object]) -> Handle:
        """Call `fn(view)` when members have changed, and once now if this process is a member."""
        self.training.listeners.append(fn)
        if not self.left:
            fn(self.view)
        return Handle(lambda: self.training.listeners.remove(fn))

    def close(self) -> None:
        """End training, on all members: each calls it after the same step. A no-op if it is closed."""
        try:
            self._finish()
        finally:
            self.release()

    def release(self) -> None:
        if os.getpid() != self._process:
            return  # a child that os.fork has made ends alone
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
        self._performer.end()  # first: a member that has come with the last step asks for it
        with contextlib.suppress(GroupError):
            self.group.submit(barrier(label="the end of training").within(_END)).wait()

    def commit(self) -> bool:
        """Vote on the step, and step the optimizer; False if it is to be computed again. See `ElasticStep.commit`."""
        if self.left:
            return False
        number, performer = self.training.opened, self.performer
        performer.resolve()
        self._check_step(number)
        with self._rescuing():
            if isinstance(self.training, OuterTraining):
                self.training.step(limit=self.steps, late=performer.quorum.late(self.training.committed))
                self._end_round()
            else:
                self._vote(number)
        if number == 0 and self.training.opened:
            pack(self.training.state_dict(), [])  # else the first that joins would end one member after the other
        if not self.done and not performer.pending:
            self.training.open()
        return self.training.opened > number

    def step(self) -> bool:
        """For a loop of your own: call it after `backward()`, in place of `optimizer.step()`. False: nothing was changed, because
        members were lost; compute the same batch again."""
        return self.commit()

    def register(self, **objects: Any) -> None:
        """Objects with `state_dict` and `load_state_dict` that belong to the run: they travel to members that join."""
        self._refuse_after_start("register", "register=")
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
        if self.training.averaged or (not self.done and self.training.begun):
            raise UsageError(
                f"the state in step {self.training.opened}: what hooks owe and buffers have changed. Save it after commit()."
            )
        if self.committed < self.training.opened and self.group.size > 1:
            raise UsageError(
                f"the state after step {self.training.opened}: in a round of {self.training.replica.hook!r} members differ. "
                "Save it after the last step of a round, when run.committed > step.number."
            )
        return self.saved_state(self.group.rank, rescued=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `state_dict()` into a safetensors file, completely or not at all: pass it to `gw.elastic(state=path)`."""
        save(self.state_dict(), Path(path))

    def load_state_dict(self, state: Source | Iterable[Source]) -> None:
        """Begin with this state, or file of `save`, or a list of those of all ranks, if nobody else has begun the run."""
        self._refuse_after_start("load_state_dict", "state=")
        states = find_states(state, remembers=self.training.remembers)
        self.training.load_state_dict(states[0].read())
        self.training.begun_from = states if self.training.remembers or not self.training.retries else []

    def _refuse_after_start(self, method: str, instead: str) -> None:
        if self._performer is not None:
            raise UsageError(
                f"{method}() of a run that has begun: the state of the others has been received. Pass {instead} to gw.elastic."
            )


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
        run.training.clear_gradients()  # of an evaluation
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

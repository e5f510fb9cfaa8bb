"""`OuterTraining`: training in rounds of many steps, as DiLoCo's. A round is what members commit, not a step.

Note [A round]
In a round each member steps its own optimizer, and communicates nothing. At the end the members average their progress since the
*anchor*, the parameters with which all began, and vote. Only this changes the anchor and the hook's states, so only this is forked,
and repeated if members are lost in it: nobody repeats a step. A member that is lost takes its progress in the round with it.

Note [Slots of a round]
Who computes which slots is fixed by the view in which the round before was committed, or by the first in which nobody had moved,
that is, made a step of the round. If members change later, those with such slots keep them, so no two compute the same; those of
members that are gone are computed by nobody. All others, such as those that join, sit the round out: at its end they receive the
state of one that has moved, with the anchor in place of its parameters. They have no progress, and the average is over the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gradwire.elasticity.machine import View
from gradwire.elasticity.stream import pairs
from gradwire.elasticity.training import Training
from gradwire.errors import HookError
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook, Trait
from gradwire.hooks.periodic.diloco import DiLoCo
from gradwire.recorder.format import RecordKind
from gradwire.reducer.hook.outer_optimizer import OuterOptimizer


class OuterTraining(Training):
    """What one member of a run in rounds trains. See Note [A round]."""

    retries = False

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, hook: CommHook | None, **options: Any
    ) -> None:
        if not isinstance(hook, DiLoCo) or hook.fragments > 1 or not hook.equalizes:
            raise HookError(
                f"gw.elastic(hook={hook!r}): after an outer step of it members have different parameters, or it keeps nothing with "
                "which one that joins could begin. Choose diloco() or sparse_loco(), or a hook that averages gradients.",
                hook=repr(hook),
            )
        self._inner, self._every = hook.hook, hook.every
        self.moved = False
        """Whether this member has made steps in the round."""
        self.ending = False
        """Whether it is at the end of the round."""
        self.prepared = False
        """Whether it has the average of the round."""
        self._begun = 0
        """How many steps were committed when the round began."""
        self._counted = 1
        """By how many members what this one owes is divided."""
        self._dealt = -1
        """The view from which it has its slots."""
        self._absent: frozenset[int] = frozenset()
        """Ranks that sit the round out."""
        self._own: dict[str, Any] | None = None
        """Of one that sits the round out: the state of its hook."""
        self._waiting: list[tuple[int, int]] = []
        """Who has moved, and gives the state to which of them, at the end of the round."""
        super().__init__(model, optimizer, hook=hook, **options)
        self.joins.allowed = False
        self.replica.state.warn_when_saved(None)
        self.replica.runner.attach_optimizer([], lambda: None)

    @property
    def outer(self) -> OuterOptimizer:
        outer = self.replica.runner.outer
        assert outer is not None
        return outer

    @property
    def opened(self) -> int:
        return self.outer.step

    @property
    def steps_committed(self) -> int:
        return self._begun

    @property
    def settings(self) -> list[float]:
        return []  # a member that was late has made fewer steps of its schedule

    @property
    def may_leave(self) -> bool:
        return self.prepared or self.group.size == 1  # else its progress would be lost

    @property
    def remembers(self) -> bool:
        return Trait.REMEMBERS in self._inner.traits

    @property
    def _in_step(self) -> bool:
        return self._dealt >= 0

    def open(self) -> None:
        self.replica.reducer.abandon("the step has ended")
        self.clear_gradients()
        self.replica.reducer.iterations.number = self.opened
        self._reduced = self.replica.reducer.steps

    def step(self, *, limit: int | None, late: bool) -> None:
        """Step the optimizer with this member's own gradients. The round ends with step `limit` at the latest, and now if it is
        `late`."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(len(self.slots) or 1)
        self._update()
        self.moved = True
        end = (self._begun // self._every + 1) * self._every
        end = end if limit is None else min(end, limit)
        self.outer.count(end if late else self.outer.step + 1)
        self.ending = self.opened == end

    def outer_step(self) -> None:
        """Average the progress of all that have moved, and step the outer optimizer: then this member is prepared."""
        waiting, self._waiting = self._waiting, []
        self._send_state(waiting)
        runner, ranks = self.replica.runner, range(self.group.size)
        moved = [rank for rank in ranks if rank not in self._absent] or [0]  # who adds zeros: all that had are gone
        if self._counted != len(moved):
            runner.change_ranks(self._counted, len(moved))
            self._counted = len(moved)
        self._fork = runner.states.fork()
        self.replica.state.sync_buffers(moved[0])
        self.outer.divisor = None if len(moved) == self.group.size else len(moved)
        self.outer.outer_step()
        self.prepared = True

    def commit(self) -> None:
        fork, self._fork = self._fork, None
        assert fork is not None
        fork.commit()
        self.replica.reducer.events.record(RecordKind.STEP_COMMITTED, self.committed)
        self.committed += 1
        self.moved = self.ending = self.prepared = False
        self.begun_from, self._reduced = [], self.replica.reducer.steps
        self._begun, self._absent = self.outer.step, frozenset()
        self._take_slots(self._view)

    def drop(self) -> None:
        fork, self._fork = self._fork, None
        self.prepared = False
        if fork is not None:
            fork.drop()

    def _use_group(self, view: View, group: Group) -> None:
        """For outer steps: those of the optimizer need none, and go on when it is aborted."""
        runner = self.replica.runner
        self.group = self.replica.state.group = runner.group = self.outer.group = group
        self.replica.reducer.events.move_to_group(group)

    def _bring_state(self, view: View) -> None:
        """Now if nobody has moved, else at the end of the round. See Note [Slots of a round]."""
        self._view, group = view, self.group
        fresh = [view.members.index(one) for one in view.fresh]
        if group.rank in fresh:
            self.moved, self.ending, self._dealt = False, False, -1
        rows = torch.empty(group.size, 3, dtype=torch.int64, device="cpu")
        mine = [self._dealt, int(self.moved or self.ending), int(self.moved)]
        group.all_gather_into_tensor(rows.view(-1), torch.tensor(mine, device="cpu"), label="who has moved")
        ranks = range(group.size)
        here = [rank for rank in ranks if rows[rank, 1]]
        if not here:
            self._absent, self._waiting = frozenset(), []
            return super()._bring_state(view)
        dealt = int(rows[here[0], 0])
        late = [rank for rank in ranks if rank not in here and rows[rank, 0] != dealt]
        self._absent = frozenset([*late, *(rank for rank in here if not rows[rank, 2])])
        self._waiting = pairs(view, here, late) if group.rank not in late else []
        if group.rank in late:
            self._own = None if group.rank in fresh else self.replica.runner.state_dict()
            self._send_state(pairs(view, here, late))
            self.ending, self._dealt, self.slots = True, dealt, []
        return None

    def _take_share(self) -> None:
        """Also the inner optimizer of the same rank, if there are as many, until it has made a step. What is owed is divided by
        `_counted` as before."""
        runner, (rank, size), step = self.replica.runner, (self.group.rank, self.group.size), self.opened
        shares = [one.read() for one in self.begun_from[rank::size]]
        if not shares:
            return
        own, *others = shares
        runner.restore(own["hook"], rank=own["hook"]["rank"])
        runner.change_ranks(1, 1, leavers=[one["hook"] for one in others])
        self.outer.count(step)  # of one that sits the round out, its last
        if len(self.begun_from) == size and not self.moved:
            self.optimizer.load_state_dict(own["optimizer"])
            self._load_as_saved(own["optimizer"]["state"], own["model"])

    def _take_slots(self, view: View) -> None:
        super()._take_slots(view)
        self._dealt = view.epoch

    def state_dict(self) -> dict[str, Any]:
        round_ = [self.moved, self.ending, self._begun, self._counted, self.slots]
        return {**super().state_dict(), "round": round_}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.moved, self.ending, self._begun, self._counted, self.slots = state["round"]
        self._dealt = 0 if self.moved or self.ending else -1

    def _arrive(self, state: Mapping[str, Any]) -> None:
        """With the parameters of the anchor. One that was here before keeps what it owes."""
        own, counted, self._own = self._own, self._counted, None
        if own is not None:
            state = {**state, "hook": {**own, "step": state["hook"]["step"]}}
        super()._arrive(state)
        self._counted = counted if own is not None else self._counted
        self.outer.to_anchor()
        self.moved = False

"""`Training`: a model, its optimizer and its data on one member, in steps that are committed or dropped.

Note [A step that may be lost]
A step changes gradients, the hook's states, buffers and random numbers before it is committed; parameters and the optimizer change
at the commit alone. So when a step begins, the hook's states are forked and the buffers copied, and a step that is dropped has both
as they were and no gradients. Random numbers need no copy: each slot of a step seeds them, so it is the same on any member, however
often it is computed.

Note [Divided by slots]
Gradients of the slots are added up, on a member by autograd and over members by the hook, and divided by the number of slots,
on any member. So what a member owes counts the same with any number of members, and need not be rescaled.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.elasticity.deal import Deal, fixed_hash, share_slots
from gradwire.elasticity.device_vote import mark, wait_for
from gradwire.elasticity.machine import View
from gradwire.elasticity.saved_states import SavedState
from gradwire.elasticity.state import checksum, receive, send
from gradwire.elasticity.stream import Joins, donors
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.groups.threads_group import ThreadGroup
from gradwire.hooks.base import CommHook, Trait
from gradwire.parallel.divergence import DivergenceSchedule, digest
from gradwire.parallel.replicate import replicate
from gradwire.policies import Buckets, Buffers, Graph, NonFinite
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import NO_OPERATION, Place
from gradwire.reducer.checks.attached_optimizers import FoundInfOverride, allocates_momentum, can_skip_step
from gradwire.reducer.hook.hook_states import StepFork

_AT_ONCE = ("hook", "owners")
"""What a member needs of the state to take part in a step."""


@dataclass(frozen=True, slots=True)
class _Averaged:
    """A step whose commit is enqueued behind a vote of the device."""

    fork: StepFork
    gradients: list[Tensor | None]
    buffers: dict[str, Tensor]
    """As they were when it began."""
    options: list[dict[str, Any]]
    """Of the optimizer's groups, when it was enqueued."""


class Training:
    """What one member of a run trains. Its `Performer` calls it, in the thread that trains."""

    retries = True
    """Whether a step that is not committed is computed again."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        hook: CommHook | None,
        data: Deal | None,
        graph: Graph,
        buckets: Buckets | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._parameters = list(model.parameters())
        self.data = data
        self.update: Callable[[], object] = optimizer.step
        """What a commit does with the averages."""
        self.committed = 0
        """How many steps are known to be committed."""
        self.slots: list[int] = []
        """Those that this member computes in the present view."""
        self.registered: dict[str, Any] = {}
        self.entered: Callable[[View], object] = lambda view: None
        """Called when this member has entered a view."""
        self.group: Group = ThreadGroup.world(1)[0]
        self.replica = replicate(
            model,
            group=self.group,
            hook=hook,
            buckets=buckets or Buckets(from_start=True),
            graph=graph,
            buffers=Buffers.NEVER,
            nonfinite=NonFinite.PASS,
        )
        self.replica.reducer.order.limits = None  # buckets depend on the model alone, so all members have the same
        self.replica.divergence = DivergenceSchedule(None)
        self.begun_from: list[SavedState] = []
        """Until the first commit, what members saved in the run that this one continues, if the hook remembers."""
        self._saved_owners: list[int] = []
        """The ranks in that run that had the slots."""
        self.joins = Joins(self.replica, self._rest, self._arrive, self._update)
        self.joins.allowed = data is not None
        self._retried = False
        """Whether the last step was dropped, to be computed again."""
        self._owners: tuple[str, ...] = ()
        self._members: tuple[str, ...] = ()
        self._fork: StepFork | None = None
        self._behind: _Averaged | None = None
        self._later: list[dict[str, Any]] = []
        """Options of the optimizer that were set after the present step was enqueued behind a gate that was closed."""
        self._buffers: dict[str, Tensor] = {}
        self._reduced = 0
        self._updating = False
        self._step_hook = optimizer.register_step_pre_hook(self._before_update)

    def open(self) -> None:
        """See Note [A step that may be lost]."""
        self._clear_gradients()
        self.replica.reducer.iterations.number = self.opened  # in records, a step has the same number on all ranks
        if self._behind is None:  # else when it is known whether the states are those of the last step
            self._fork = self.replica.runner.states.fork()
        self._reduced = self.replica.reducer.steps
        self._buffers = self.replica.state.copied_buffers()

    @property
    def gate(self) -> torch.device | None:
        """The device that may vote: nothing but the optimizer depends on the vote, and it can be told by the device. Else None."""
        device = self.replica.parameters[0].device
        hooks = len(self.optimizer._optimizer_step_pre_hooks) > 1 or self.optimizer._optimizer_step_post_hooks
        plain = self.update == self.optimizer.step and not (hooks or self.registered) and self.data is not None
        ordered = device.type == "cuda" and self.replica.graph is Graph.ALL_USED and self.group.orders_streams(device)
        skips = can_skip_step(self.optimizer) and not allocates_momentum(self.optimizer)
        return device if plain and ordered and skips else None

    def wait_for_averages(self, lost: Callable[[], bool]) -> None:
        """Where operations only order streams, wait until the device has all averages."""
        device = self.replica.parameters[0].device
        if self.group.orders_streams(device):
            wait_for(mark(device), lost, self.group.timeout, f"averages of step {self.opened} of {self.group}")

    @property
    def may_leave(self) -> bool:
        """Whether nothing of this member is lost if it leaves with a change of members that nobody has voted for."""
        return True

    @property
    def steps_committed(self) -> int:
        """How many steps of the optimizer are known to be committed."""
        return self.committed

    @property
    def opened(self) -> int:
        """The number of the present step: one more than is committed while it is not known whether the last one was."""
        return self.committed + (self._behind is not None)

    @property
    def averaged(self) -> int:
        """How many times gradients were averaged in the step: once, when this member has the average of every bucket."""
        return self.replica.reducer.steps - self._reduced

    @property
    def settings(self) -> list[float]:
        """Numbers of the optimizer, such as its rate, which are equal on all members."""
        groups = self.optimizer.param_groups
        return [float(v) for group in groups for _, v in sorted(group.items()) if isinstance(v, int | float)]

    def facts(self, view: View, *, digests: bool) -> list[int]:
        """What must be equal on all members when they vote."""
        hook, data = repr(self.replica.hook), () if self.data is None else self.data.facts
        begun = [(one.rank, one.facts) for one in self.begun_from]
        return [
            fixed_hash(self.opened, view.epoch, hook, begun, self._owners, data, self.gate is None, *self.settings),
            self.digest if digests else 0,
        ]

    @property
    def digest(self) -> int:
        """Of the bits of all parameters. On the CPU a checksum takes a quarter of the time or less."""
        of = lambda p: checksum(p) if p.device.type == "cpu" else int(digest(p))  # noqa: E731
        return fixed_hash(*((p.dtype, *p.shape, of(p)) for p in self.replica.parameters))

    @property
    def remembers(self) -> bool:
        """Whether members may owe something to the average."""
        return Trait.REMEMBERS in self.replica.runner.hook.traits

    def _before_update(self, *_: object) -> None:
        if self._in_step and not self._updating:
            raise UsageError(
                f"optimizer.step() in step {self.opened} of a run: it would change parameters before the members have voted. "
                "Call commit() instead, which calls it, or the update= that you pass to gw.elastic."
            )

    @property
    def _in_step(self) -> bool:
        return (self._fork or self._behind) is not None

    def commit(self) -> None:
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
        self.replica.reducer.events.step(RecordKind.STEP_COMMITTED, self.committed)
        self.committed += 1

    def _update(self, step: int | None = None) -> None:
        """Commit the averages, as those of an earlier step if one is given."""
        now, self._updating = self.committed, True
        self.committed = now if step is None else step
        try:
            self.update()
        finally:
            self.committed, self._updating = now, False

    def commit_behind(self, closed: Tensor) -> None:
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

    def _options(self) -> list[dict[str, Any]]:
        groups = [{k: v for k, v in one.items() if k != "params"} for one in self.optimizer.param_groups]
        return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in one.items()} for one in groups]

    def _use(self, options: list[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, options, strict=False):
            group.update(values)

    def drop(self) -> None:
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
        self.replica.reducer.abandon("the step has ended")
        self._clear_gradients()
        return fork

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def detach(self) -> None:
        """Leave the model and the optimizer as they were before."""
        self.joins.close()
        self._step_hook.remove()
        self.replica.detach()

    def hand_over(self, leaving: bool) -> None:
        group, runner = self.group, self.replica.runner
        if not self.remembers:
            return
        flags = torch.empty(group.size, dtype=torch.int64, device="cpu")
        mine = (
            2 if self.joins.lag and not leaving else int(leaving)
        )  # one that may have to begin again takes on nothing
        group.all_gather_into_tensor(flags, torch.tensor([mine], device="cpu"), label="who leaves")
        leavers = [rank for rank in range(group.size) if flags[rank] == 1]
        heir = next((rank for rank in range(group.size) if not flags[rank]), None)
        if heir is None:
            return
        if leaving:
            saved = runner.state_dict()
            send(group, heir, saved)
            runner.restore(saved, rank=-1)  # it owes nothing now
        elif group.rank == heir:
            runner.change_ranks(1, 1, leavers=[receive(group, rank) for rank in leavers])
        group.barrier(label="handed over")  # nobody aborts the group before

    def follow(self, view: View) -> None:
        if (recorder := writer.active) is not None:
            facts = {"epoch": view.epoch, "members": view.members, "step": view.step, "retried": self._retried}
            recorder.describe("view", {**facts, "time": time.time()})
        self._retried, self._members = False, view.members
        if self.data is not None:  # of a fresh member, what it gets from another one replaces it
            saved = self._saved_owners if len(self._saved_owners) == self.data.slots else []
            before = self._owners or [dict(enumerate(view.members)).get(rank, "") for rank in saved]
            idle = view.fresh if self.joins.stream_in(view) else ()
            self._owners = share_slots(self.data.slots, [m for m in view.members if m not in idle], before)

    def enter(self, view: View, group: Group) -> None:
        self.joins.close()
        self._use_group(view, group)
        self._bring_state(view)
        self.begun_from = self.begun_from if view.begins else []
        self._take_share()
        self.committed = view.step
        self.joins.enter(view, group)
        self._take_slots(view)
        if (recorder := writer.active) is not None:
            operation = NO_OPERATION[:2] + (view.epoch,) + NO_OPERATION[3:]
            member, place = group.ledger.events.member(recorder), Place(view.step)
            recorder.put(RecordKind.VIEW, member, operation, nbytes=group.size, place=place)
        self.entered(view)

    def _take_share(self) -> None:
        """Take on what the same rank owed in the run before, and those whose number no rank has now."""
        runner, (rank, size) = self.replica.runner, (self.group.rank, self.group.size)
        shares = [one.read()["hook"] for one in self.begun_from[rank::size]]
        if shares:
            runner.restore(shares[0], rank=shares[0]["rank"])
            sizes = (1, 1) if self.data is not None else (self.begun_from[0].facts["size"], size)
            runner.change_ranks(*sizes, leavers=shares[1:])

    def _use_group(self, view: View, group: Group) -> None:
        before, self.group = self.group.size, group
        self.replica.move_to_group(group)
        if self.data is None and view.epoch and view.members[group.rank] not in view.fresh:
            self.replica.runner.change_ranks(before, group.size)  # gradients are divided by the number of members

    def _bring_state(self, view: View) -> None:
        """To the fresh members of the view."""
        self._send_state(donors(view), only=_AT_ONCE if self.joins.stream_in(view) else None)

    def _send_state(self, pairs: Sequence[tuple[int, int]], *, only: Sequence[str] | None = None) -> None:
        """From one member to another one, in each pair: each of both calls it."""
        for donor, rank in pairs:
            if self.group.rank == donor:
                send(self.group, rank, {k: v for k, v in self._travelling().items() if only is None or k in only})
            elif self.group.rank == rank:
                self._arrive(receive(self.group, donor))

    def _take_slots(self, view: View) -> None:
        """Those that this member computes in the view."""
        if self.data is not None:
            me = view.members[self.group.rank]
            self.slots = [slot for slot, owner in enumerate(self._owners) if owner == me]
            self.replica.runner.divisor = self.data.slots

    @property
    def computing(self) -> Group:
        """The group of the members that have the state."""
        return self.joins.group or self.group

    def catch_up(self, lost: Callable[[], bool]) -> bool:
        """In place of forward and backward, on a member that receives the state. True: the others have waited for it, and it has
        the state; else it takes part in the reductions."""
        waited = self.joins.catch_up(self.committed, lost)
        self._clear_gradients()
        self._buffers = self.replica.state.copied_buffers()
        if not waited:
            self.joins.contribute_zeros()
        return waited

    def state_dict(self) -> dict[str, Any]:
        model = self.model.state_dict()
        return {
            "committed": self.committed,
            "model": model,
            "versions": getattr(model, "_metadata", {}),
            "optimizer": self.optimizer.state_dict(),
            "registered": {name: one.state_dict() for name, one in self.registered.items()},
            "hook": self.replica.runner.state_dict(),
            "slots": [self._members.index(owner) for owner in self._owners],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["registered"].keys() != self.registered.keys():
            known, named = (", ".join(sorted(names)) or "nothing" for names in (state["registered"], self.registered))
            raise UsageError(
                f"the state of a run with register= of {known}, and here it is of {named}: register the same."
            )
        model = OrderedDict(state["model"])
        model._metadata = state["versions"]  # type: ignore[attr-defined]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_as_saved(state["optimizer"]["state"], model)
        for name, one in self.registered.items():
            one.load_state_dict(state["registered"][name])
        if "hook" in state:
            self._load_hook(state["hook"])
        self.committed = state["committed"]
        self._saved_owners = state.get("slots", [])

    def _load_hook(self, saved: Mapping[str, Any]) -> None:
        self.replica.runner.restore(saved, rank=saved["rank"])  # also what that rank owes

    def _load_as_saved(self, saved: Mapping[int, Mapping[str, Any]], model: Mapping[str, Tensor]) -> None:
        """Tensors of the optimizer, of which torch makes no copies, and changes the dtype to that of the parameter."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        for number, parameter in enumerate(parameters):
            here, before = self.optimizer.state.get(parameter, {}), model.get(names[parameter])
            same = before is not None and before.dtype == parameter.dtype
            for key, value in saved.get(number, {}).items():
                if isinstance(now := here.get(key), Tensor):
                    here[key] = value.to(now.device, value.dtype if same else now.dtype, copy=True)

    def _travelling(self) -> dict[str, Any]:
        state, hook = self.state_dict(), self.replica.hook
        saved = state["hook"]
        mine = {"buffers": dict(self.model.named_buffers()), "owners": self._owners}  # also those that are not saved
        return {**state, "hook": {**saved, "state": hook.shared(saved["state"]), "owed": {}}, **mine}

    def _rest(self) -> dict[str, Any]:
        return {name: part for name, part in self._travelling().items() if name not in _AT_ONCE}

    def _arrive(self, state: Mapping[str, Any]) -> None:
        self._owners = state.get("owners", self._owners)
        if "model" not in state:
            return self._load_hook(state["hook"])
        committed = self.committed
        self.load_state_dict(state)
        self.committed = committed
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(state["buffers"][name])
        return None

"""`Training`: what one member of a run trains, in the views that it is in.

Note [Divided by slots]
Gradients of the slots are added up, on a member by autograd and over members by the hook, and divided by the number of slots,
on any member. So what a member owes counts the same with any number of members, and need not be rescaled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from gradwire.elasticity.deal import fixed_hash, share_slots
from gradwire.elasticity.machine import View
from gradwire.elasticity.state import receive, send
from gradwire.elasticity.stream import donors
from gradwire.elasticity.trained_state import AT_ONCE
from gradwire.elasticity.training_steps import TrainingSteps
from gradwire.groups.base import Group
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.recorder.writer import NO_OPERATION, Place
from gradwire.reducer.hook.hook_states import owed_norm
from gradwire.runtime.warnings import warn_user


class Training(TrainingSteps):
    """What one member of a run trains. Its `Performer` calls it, in the thread that trains."""

    retries = True
    """Whether a step that is not committed is computed again."""

    @property
    def may_leave(self) -> bool:
        """Whether nothing of this member is lost if it leaves with a change of members that nobody has voted for."""
        return True

    def facts(self, view: View, *, digests: bool) -> list[int]:
        """What must be equal on all members when they vote. What changes with the view alone is asked when they compare digests,
        as in its first step."""
        if digests:
            begun = [(one.rank, one.facts) for one in self.begun_from]
            data = () if self.data is None else self.data.facts
            self._agreed = fixed_hash(view.epoch, self.replica.hook, begun, self._owners, data)
        return [fixed_hash(self.opened, self._agreed, self.gate is None, *self.settings), self.digest if digests else 0]

    def compare_owed(self) -> None:
        """What a member owes is lost if it dies; then the others say how much that was when it last told them."""
        if self.remembers:
            norms, runner = torch.empty(self.group.size, dtype=torch.float64, device="cpu"), self.replica.runner
            mine = norms.new_tensor([owed_norm(runner.state_dict(), runner.states.hook)])
            self.group.all_gather_into_tensor(norms, mine, label="what members owe")
            self._owes = {one: (norm, self.opened) for one, norm in zip(self._members, norms.tolist(), strict=True)}

    def _tell_what_is_lost(self, view: View) -> None:
        lost = {one: self._owes.pop(one) for one in [*self._owes] if one not in view.members}
        first = next((rank for rank, one in enumerate(view.members) if one not in view.fresh), 0)
        for one, (norm, step) in lost.items() if self.group.rank == first else ():
            amount = "how much is not known" if math.isnan(norm) else f"of norm {norm:.3g} in step {step}"
            warn_user(f"{one} is lost, and with it what it owed to the average, {amount}.")

    def detach(self) -> None:
        """Leave the model and the optimizer as they were before."""
        self.joins.close()
        self._step_hook.remove()
        self.replica.detach()

    def hand_over(self, leaving: bool) -> None:
        """Some members leave: one that stays takes on what they owe. A collective of the old view."""
        group, runner = self.group, self.replica.runner
        if not self.remembers:
            return
        flags = torch.empty(group.size, dtype=torch.int64, device="cpu")
        mine = 2 if self.joins.lag and not leaving else int(leaving)  # one that may have to begin again is no heir
        group.all_gather_into_tensor(flags, torch.tensor([mine], device="cpu"), label="who leaves")
        leavers = [rank for rank in range(group.size) if flags[rank] == 1]
        for rank in leavers:
            self._owes.pop(self._members[rank], None)
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
        """This view comes next, whether or not its group can be made: called for every view with this member, in order."""
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
        """Use this group; give the state to the fresh members of the view, or receive it."""
        self.joins.close()
        self._use_group(view, group)
        self._tell_what_is_lost(view)
        self.begun_from = self.begun_from if view.begins else []
        self._bring_state(view)
        self._take_share()
        self.committed = view.step
        self.joins.enter(view, group)
        if (recorder := writer.active) is not None:
            operation = NO_OPERATION[:2] + (view.epoch,) + NO_OPERATION[3:]
            member, place = group.ledger.events.member(recorder), Place(view.step)
            recorder.put(RecordKind.VIEW, member, operation, nbytes=group.size, place=place)
        for fn in list(self.listeners):
            fn(view)

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
        """To the fresh members of the view; then all know their slots."""
        self._send_state(donors(view), only=AT_ONCE if self.joins.stream_in(view) else None)
        self._take_slots(view)

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

    def catch_up(self, lost: Callable[[], bool]) -> bool:
        """In place of forward and backward, on a member that receives the state. True: the others have waited for it, and it has
        the state; else it takes part in the reductions."""
        waited = self.joins.catch_up(self.committed, lost)
        self.clear_gradients()
        self._buffers = self.replica.state.copied_buffers()
        if not waited:
            self.joins.contribute_zeros()
        return waited

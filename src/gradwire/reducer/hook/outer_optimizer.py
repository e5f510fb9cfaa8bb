"""Runs the outer half of an OuterHook on a model's parameters, after its optimizer's steps.

It has buckets of its own: the parameters in the model's order, by dtype and device, cut into as many fragments as the hook wants
and these into pieces of limited size. They depend on nothing that happens in a backward, so they stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageError
from gradwire.groups.base import Group
from gradwire.hooks.base import Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.periodic.base import OuterHook
from gradwire.hooks.pump import begin
from gradwire.hooks.state import join_flat, split_flat
from gradwire.reducer.checks.attached_optimizers import AttachedOptimizers
from gradwire.reducer.hook.driver import Finished, Pending, SingleCollective, run
from gradwire.reducer.hook.hook_states import HookStates, to_dict

PIECE = 64 * 2**20
"""Bytes of parameters that are copied and sent at a time."""


def local(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter that is sharded (a DTensor)."""
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard


@dataclass(slots=True)
class _Piece:
    """Some parameters of one fragment."""

    fragment: int
    spec: BucketSpec
    parameters: list[Tensor]
    rounds: int = 0
    result: Pending | None = None
    lands: int = 0

    def flat(self) -> Tensor:
        row = torch.empty(self.spec.numel, dtype=self.spec.dtype, device=self.spec.device)
        torch._foreach_copy_(self.spec.views(row), [local(p.detach()) for p in self.parameters])
        return row

    def go_back(self, rounds: int, lands: int, result: Pending | None) -> None:
        self.rounds, self.lands, self.result = rounds, lands, result

    def put(self, row: Tensor) -> None:
        torch._foreach_copy_([local(p) for p in self.parameters], self.spec.views(row))


class OuterOptimizer:
    """The outer half of one hook on one rank's parameters. Every rank makes it when its parameters are those of all."""

    @torch.no_grad()
    def __init__(
        self,
        hook: OuterHook,
        group: Group,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        states: HookStates,
        saved: Mapping[str, Any] | None = None,
        optimizers: AttachedOptimizers,
    ) -> None:
        self.hook = hook
        self.group = group
        self.step = states.steps
        """How many steps the optimizer has made."""
        self.optimizers = optimizers
        self.differ = saved is not None and self._differ_after(self.step)
        """Whether ranks may hold different parameters now."""
        self.divisor: int | None = None
        """How many ranks are in the averages, if not all: the others are at the anchor."""
        self._states = states
        self._stepped = False
        self._backwards = 0
        self._owed = False
        self._pieces = [_Piece(*piece) for piece in cut(list(named_parameters), hook.fragments)]
        self._fresh = saved is None
        outer: Mapping[str, Any] = (saved or {}).get("outer", {})
        for piece in self._pieces:
            piece.rounds = int(outer.get("rounds", {}).get(piece.fragment, 0))
            if piece.fragment in outer.get("lands", {}):
                piece.lands = int(outer["lands"][piece.fragment])
                came = outer["came"]
                piece.result = Finished(join_flat(came, piece.spec, dtype=came[piece.spec.names[0]].dtype))
        self._begin()

    def _begin(self) -> None:
        for piece in self._pieces:
            self.hook.begin(piece.flat(), self._states.of(piece.spec), self._turn(piece))

    @torch.no_grad()
    def training_begins(self) -> None:
        """Before the first step: a checkpoint may have been loaded into the model since this was made."""
        if self._fresh:
            self._fresh = False
            self._begin()

    @torch.no_grad()
    def backward_begins(self) -> None:
        """The first backward is where training starts. Raise if an outer step was due but optimizer steps are not reported."""
        self.training_begins()
        if self._stepped or self.optimizers.attached:
            return
        if self._owed:
            raise UsageError(
                f"{self.hook!r} on rank {self.group.rank}: an outer step was due after step {self.step + self._backwards}, but "
                "the optimizer's steps were not reported, so the ranks would diverge permanently. Call "
                "model.attach_optimizer(optimizer) once before training; or model.attach_optimizer() and then "
                "model.outer_step() after every step."
            )
        self._backwards += 1
        self._owed = bool(self.hook.due(self.step + self._backwards))

    @torch.no_grad()
    def optimizer_stepped(self) -> None:
        """The optimizer has made a step: have the outer steps that are due, in which every rank takes part."""
        due = self.count(self.step + 1)
        for piece in self._pieces:
            if piece.result is not None and piece.lands <= self.step:
                self._settle(piece)
        self.outer_step(due)
        if not self.hook.averages_gradients(self.step - 1) or due:
            self.differ = self._differ_after(self.step)

    def count(self, step: int) -> tuple[int, ...]:
        """The optimizer has made so many steps: the fragments that have an outer step after the last one."""
        self._states.will_change(-1, partial(self._step_back, self.step, self.differ))
        self._stepped = True
        self._fresh = False
        self.step = step
        return self.hook.due(step)

    @torch.no_grad()
    def outer_step(self, fragments: Sequence[int] = (0,)) -> None:
        """Have the outer steps of these fragments."""
        for piece in self._pieces:
            if piece.fragment in fragments:
                self._send(piece)

    @torch.no_grad()
    def to_anchor(self) -> None:
        """Have the parameters with which the round began, for a hook such as `diloco`."""
        for piece in self._pieces:
            piece.put(self._states.of(piece.spec).anchor)

    def step_or_abort(self) -> None:
        """`optimizer_stepped`; if it fails here, the other ranks must not wait."""
        try:
            self.optimizer_stepped()
        except BaseException as error:
            if self.group.failure is None:
                self.group.abort(f"an outer step failed on rank {self.group.rank} with {type(error).__name__}: {error}")
            raise

    def _differ_after(self, step: int) -> bool:
        """Whether ranks may differ after the optimizer's step of this number and its outer step."""
        united = self.hook.equalizes and len(self.hook.due(step)) == self.hook.fragments
        return not united and not self.hook.averages_gradients(step - 1) and self.group.size > 1

    def _step_back(self, step: int, differ: bool) -> None:
        self.step, self.differ = step, differ

    def _send(self, piece: _Piece) -> None:
        self._states.will_change(piece.spec.index, partial(piece.go_back, piece.rounds, piece.lands, None))
        state = self._states.of(piece.spec)
        reduction = begin(self.hook, self.hook.after_step, piece.flat(), state, self._turn(piece))
        if self.hook.delay and self.hook.outer_collectives == 1:
            # On its way while the next steps are computed, and submitted here, in the order of all that this thread submits.
            piece.result = SingleCollective(reduction, self.group, self.hook)
        else:
            piece.result = Finished(run(reduction, self.group))
        piece.lands = self.step + self.hook.delay
        if not self.hook.delay:
            self._settle(piece)

    def _settle(self, piece: _Piece) -> None:
        assert piece.result is not None
        came, piece.result = piece.result.wait(), None
        back = partial(piece.go_back, piece.rounds, piece.lands, Finished(came))
        self._states.will_change(piece.spec.index, back)
        if self._states.forked:
            self._states.will_change(piece.spec.index, partial(piece.put, piece.flat()))
        state = self._states.of(piece.spec)
        piece.put(self.hook.settle(piece.flat(), came, state, self._turn(piece)))
        piece.rounds += 1

    def _turn(self, piece: _Piece) -> Turn:
        group = self.group
        return Turn(
            piece.spec, group.rank, group.size, piece.rounds, donated=True, divisor=self.divisor, hosts=group.layout
        )

    @torch.no_grad()
    def average(self) -> None:
        """Make the parameters their mean over all ranks."""
        for piece in self._pieces:
            row = piece.flat()
            self.group.submit(all_reduce(row, op=ReduceOp.AVG, label="average of parameters")).wait()
            piece.put(row)
        self.differ = False

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The states by parameter name, and what is on its way."""
        came: dict[str, Tensor] = {}
        lands: dict[int, int] = {}
        for piece in self._pieces:
            if piece.result is not None:
                piece.result = Finished(piece.result.wait())
                came.update(split_flat(piece.result.wait(), piece.spec))
                lands[piece.fragment] = piece.lands
        rounds = {piece.fragment: piece.rounds for piece in self._pieces}
        return to_dict(
            self._states, rank=self.group.rank, step=self.step, outer={"rounds": rounds, "lands": lands, "came": came}
        )


def cut(
    named: Sequence[tuple[str, Tensor]], fragments: int, *, limit: int = PIECE
) -> list[tuple[int, BucketSpec, list[Tensor]]]:
    """The parameters in pieces: (fragment, spec, parameters). Whole parameters, in their order, about as many bytes in each. A
    tensor is in the fragment in which its middle lies, so one large parameter makes its fragment larger than the others."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        kinds.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
    pieces: list[tuple[int, list[tuple[str, Tensor]]]] = []
    for members in kinds.values():
        total, before, size = sum(p.numel() for _, p in members), 0, 0
        at = -1
        for name, parameter in members:
            fragment = min(fragments - 1, int((before + parameter.numel() / 2) * fragments / max(total, 1)))
            before += parameter.numel()
            nbytes = local(parameter).nbytes
            if fragment != at or size + nbytes > limit:
                pieces.append((fragment, []))
                at, size = fragment, 0
            pieces[-1][1].append((name, parameter))
            size += nbytes
    return [
        (fragment, BucketSpec.of(i, [(n, local(p)) for n, p in members], local(members[0][1])), [p for _, p in members])
        for i, (fragment, members) in enumerate(pieces)
    ]

"""The reducer: gradients of one model on one rank, from "ready" to "averaged and back in .grad".

It runs what the state machine decides, with real gradients, buckets and reductions. It does not know where a hook came
from, which flags a user passed, or what a module is.

Note [The parts of a step]
`intake/` collects gradients and returns full buckets, counted by `machine.py`. `buckets/` holds the memory, `reductions.py`
launches buckets and puts averages back, with a `hook/runner.py` that reduces them. `iterations.py` fails a step on all ranks.

Note [The end of a step]
A backward that reaches the model's outputs, or one of its parameters, queues one callback for the end of that graph task. There the
gradients that did not call are counted, the last bucket is launched, and the step is finished once all buckets have been launched.
If it raises instead, `iterations.py` fails the step. If it ends without having reached any parameter, it cannot be told from
a backward that another rank averages: the step fails too, or, where unused parameters are allowed, zeros are sent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd.backward_end import at_backward_end
from gradwire.autograd.backward_errors import RETURNED, around_backward
from gradwire.collectives import broadcast
from gradwire.errors import GradwireError
from gradwire.events import BackwardBegan, BackwardEnded, GradientReady, StepEnded
from gradwire.groups.base import Group
from gradwire.recorder.format import RecordKind
from gradwire.reducer.buckets.buffers import BucketBuffers
from gradwire.reducer.buckets.layout import BucketLayout
from gradwire.reducer.checks.nonfinite_report import StepRejected
from gradwire.reducer.intake.intake import GradientIntake, reducers
from gradwire.reducer.intake.learned import BucketOrder, UsedParameters
from gradwire.reducer.iterations import Iterations
from gradwire.reducer.machine import Launch, Machine, State
from gradwire.reducer.model_events import ModelEvents
from gradwire.reducer.reductions import Reductions, Runner

_RESTING = State.RESTING  # to look up a member of an Enum takes ten times as long


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How a reducer treats gradients and buckets. The defaults are those of torch's DDP."""

    limits: tuple[int, ...]
    """Sizes in bytes of the first, second, … bucket; the last one applies to all that follow."""
    keep_views: bool = False
    """Gradients are views of the buckets once their bucket has been launched."""
    lazy_buckets: bool = False
    """Bucket memory is allocated at launch and released at the end of the step."""
    track_unused: bool = False
    """Ranks exchange in every step which parameters they used. Else buckets are rebuilt once the order of gradients is known."""
    skip_unused: bool = False
    """Buckets none of whose parameters are used are not reduced."""


class Reducer:
    """Reduces the gradients of one model on one rank."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: BucketLayout,
        *,
        group: Group,
        runner: Runner,
        options: ReducerOptions,
    ) -> None:
        self.parameters = list(parameters)
        self.device = self.parameters[0].device
        self.group = group
        self.events = ModelEvents(group)
        self.steps = self.late = 0
        self.manual = False
        """Whether the owner calls `finish` after the last launch, instead of the end of backward."""
        self.leave_gradients = False
        """Whether averages are not put back, as an optimizer has used them in backward."""
        self.after_backward: list[Callable[[], None]] = []
        self.wait_at_end: list[torch.futures.Future[Any]] = []
        self.substituted = False
        """Whether the last forward ran with other tensors in place of the parameters, as under `torch.func.functional_call`."""
        self.check_agreed: Callable[[bool], object] | None = None
        """Called when gradients of the model's outputs arrive, with whether they are to be averaged; it may raise. A backward
        that accumulates nothing, as of `torch.autograd.grad`, does not count."""
        self.incomplete: Callable[[], object] | None = None
        """Called when a backward has ended in which some parameters got no gradient; it may raise."""
        self.machine = Machine(layout.members, [s.name for s in layout.parameters], rank=group.rank)
        self.buckets = BucketBuffers(parameters, layout, keep_views=options.keep_views, lazy=options.lazy_buckets)
        self.order = BucketOrder(layout.parameters, None if options.track_unused else options.limits)
        self.used = UsedParameters(len(parameters), track=options.track_unused, device=self.device)
        self.intake = GradientIntake(
            self.parameters, self.machine, in_buckets=options.keep_views, limits=options.limits
        )
        self.reductions = Reductions(group, runner, self.buckets, self.intake, self.events)
        self.iterations = Iterations(self.parameters, group, self.machine, self.events, abandon=self.abandon)
        self._skip_unused = options.skip_unused
        self._first_layout = layout
        self.backward_runs = False
        """Whether a backward is running that has reached the outputs of the model or one of its parameters."""
        self._outputs_reached = False
        self._lock = threading.RLock()  # a model on several devices has a thread for each of them in backward
        self.buckets.allocate(layout, group)
        around_backward(RETURNED, self.backward_returned)
        reducers.add(self)

    @property
    def layout(self) -> BucketLayout:
        return self.buckets.layout

    def attach(self) -> None:
        self.intake.attach(self.on_arrival, self.early)

    # -- between steps -------------------------------------------------------------------------------------------------

    def rebuild(self, *, order: Sequence[str] | None = None) -> bool:
        """After the first step: assign the parameters to buckets in the order in which rank 0's gradients arrived.

        A collective, unless an `order` is given that all ranks have: that of the model of which this one is a copy.
        """
        if self.machine.state is State.RUNNING:
            return False
        if order is not None:
            self.order.expect(order)
        layout = self.order.rebuild(self.group if order is None else None, self.device)
        if layout is None:
            return False
        self._use_layout(layout)
        self.order.rebuilt = True  # not before: memory may be short, and the next forward tries again
        return True

    def _use_layout(self, layout: BucketLayout) -> None:
        self.machine.abandon("buckets are rebuilt")
        self.machine.relayout(layout.members)
        self.buckets.allocate(layout, self.group)
        self.intake.forget()
        self.reductions.runner.buckets_changed()

    def begin_again(self, layout: BucketLayout) -> None:
        """Parameters have another dtype or device: use this layout, and learn the rest as after construction."""
        self.device = self.parameters[0].device
        self.order = BucketOrder(layout.parameters, self.order.limits)
        self.used = UsedParameters(len(self.parameters), track=self.used.track, device=self.device)
        if self.machine.static_uses is not None:
            self.learn_static_graph()
        self._first_layout = layout
        self._use_layout(layout)
        if self.intake.hooks is not None:
            self.intake.hooks.attach()

    def start_over(self) -> None:
        """After a failed step: begin as after construction, with rank 0's count of steps.

        Ranks fail at different points: some have finished the step, some know the order in which gradients arrived or what a
        static graph uses, some have rebuilt their buckets, and some have not. So all go back to the first buckets and learn
        the rest again, together.
        """
        self.machine.abandon("the group was recovered")
        self.reductions.drop()
        self.iterations.failure = None
        self.wait_at_end.clear()
        steps = torch.tensor([self.steps], device=self.device)
        self.group.submit(broadcast(steps, src=0, label="recovery")).wait()
        self.steps = int(steps.item())
        self.used.seen.clear()
        self.order.forget()
        if self.layout is not self._first_layout:
            self._use_layout(self._first_layout)
        if self.used.learning or self.machine.static_uses is not None:
            self.learn_static_graph()

    def move_to_group(self, group: Group) -> None:
        self.group = self.iterations.group = self.reductions.group = group
        self.events.move_to_group(group)
        self.machine.abandon("the group was exchanged")
        self.machine.rank = group.rank
        self.order.forget()
        self.buckets.allocate(self.layout, group)

    def learn_static_graph(self) -> None:
        """Count uses in the next backward and reduce at its end; from then on expect the same."""
        self.used.learn_static_graph()
        self.machine.static_uses = None

    def prepare(self, unused: Iterable[int] = (), *, all_call: bool = False) -> None:
        """A forward has ended whose backward is to be synchronized. `all_call`: its outputs cannot be hooked."""
        self.catch_up()
        if torch._C._current_graph_task_id() == -1:
            self.backward_runs = self._outputs_reached = False
        unused = list(unused)
        try:
            self.machine.prepare(unused)
        except GradwireError as error:
            self.iterations.fail_forward(error)
            raise
        self.reductions.drop()
        self.reductions.unused = frozenset(unused) if self._skip_unused else ()
        self.iterations.forward_ended()
        self.reductions.step = self.iterations.number
        self.used.uses.clear()
        # Not where an optimizer steps in backward, and not where the caller finalizes, perhaps during backward.
        may_take_early = not (self.used.learning or self.leave_gradients or self.manual)
        all_call = all_call or self.manual or self.used.learning or self.events.wants(GradientReady)
        self.intake.prepare(all_call=all_call, unused=unused, may_take_early=may_take_early)

    # -- during backward -----------------------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """A backward has reached the model's outputs, or one of its parameters: see [The end of a step]."""
        self._outputs_reached = True
        if not self.backward_runs:
            self.backward_runs = True
            self.events.emit_now(BackwardBegan)
            at_backward_end(self._graph_task_ended, failed=self._graph_task_failed)

    def on_arrival(self) -> None:
        with self._lock:
            self.catch_up()

    def early(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Compiled code has computed these gradients; they will be accumulated when all of its graph has run."""
        with self._lock:
            taken = self.intake.early(indices, gradients)
            if taken:
                self.catch_up()
                self._arrived(taken, early=True)

    def catch_up(self) -> None:
        arrived = self.intake.pop()
        if arrived:
            self._arrived(arrived)

    def _arrived(self, indices: Sequence[int], *, early: bool = False) -> None:
        """These gradients have been accumulated, in this order, or will be (`early`)."""
        used = self.used
        if used.exchanged:
            used.seen.update(indices if early else [i for i in indices if self.parameters[i].grad is not None])
        if self.machine.state is _RESTING:
            self.late = self.steps  # after that step gradients were added to its averages
            if self.iterations.failure is not None:
                raise self.iterations.failure
            if self.check_agreed is not None and self._outputs_reached:
                self.check_agreed(False)
            return
        if self.events and self.events.wants(GradientReady):
            for i in indices:
                self.events.emit(GradientReady(time.perf_counter(), self.group.rank, self.machine.names[i], i))
        if not self.backward_runs and torch._C._current_graph_task_id() != -1:
            self.backward_begins()  # no output was found to hook
        if used.learning:
            used.uses.update(indices)
        else:
            self._launch(self.intake.count, indices)

    def _launch(self, find: Callable[..., Sequence[Launch]], *args: Any) -> None:
        """Launch the buckets that `find(*args)` returns, except that the last one of a step waits for the end of backward.

        Until then this rank's backward may still fail, even after its last gradient. As no other rank can finish the step
        without the last bucket, all of them fail it together: see [Iterations] in `iterations.py`.
        """
        try:
            if self.check_agreed is not None:
                self.check_agreed(True)
            launches = find(*args)
            if not launches:
                return
            if launches[-1].last and not self.manual:
                self.reductions.hold(launches[-1])
                launches = launches[:-1]
            self.reductions.launch(launches)
        except BaseException as error:
            if self.iterations.failed(error):
                raise

    # -- the end of backward -------------------------------------------------------------------------------------------

    def _graph_task_failed(self) -> None:
        self.backward_runs = False

    def _graph_task_ended(self) -> None:
        self.backward_runs = False
        self.catch_up()
        if self.manual or self.machine.state is _RESTING:  # else `finish` emits it
            self.events.emit_now(BackwardEnded)
        if self.used.learning:
            self._first_static_step_ended()
        if self.machine.complete:
            if self.substituted and self.incomplete is not None:  # by functional_call, which is over now, or for good
                self.incomplete()
            if not self.manual:
                self.finish()
        elif self.machine.state is State.RUNNING and self.incomplete is not None:
            self.incomplete()

    def _first_static_step_ended(self) -> None:
        """At the end of the first backward of a static graph: reduce everything, and remember how often each was used."""
        uses = self.used.pop_first_uses()
        if not uses:
            return  # this was `torch.autograd.grad`, which accumulates nothing: the backward is still to come
        machine, everything = self.machine, range(len(self.parameters))
        if len(uses) < len(everything) and self.incomplete is not None:
            self.incomplete()
        machine.prepare(i for i in everything if i not in uses)
        self._launch(machine.arrived, list(uses))  # in the order in which they arrived first
        machine.static_uses = [uses[i] for i in everything]
        machine.arrival = []  # as in torch, the order is taken from the second step of a static graph

    def backward_returned(self, tensors: Any) -> None:
        """A backward that accumulates all gradients has returned, of this model or of another: see [The end of a step]."""
        if not self._outputs_reached or self.backward_runs:
            return
        if self.machine.state is not State.ARMED or not self.iterations.is_of_this_model(tensors):
            return
        self._outputs_reached = False
        if not any(p.requires_grad for p in self.parameters):
            return  # the model was frozen for this backward, as a discriminator is while its generator is trained
        if self.incomplete is not None:
            self.incomplete()
        if self.substituted:
            return
        self._launch(self.machine.nothing_arrived)
        if self.machine.complete and not self.manual:
            self.finish()

    def finish(self) -> None:
        """Wait for the reductions and put the averages back into `.grad`."""
        try:
            if self.reductions.held is not None:
                self.reductions.launch([self.reductions.held])
            self.events.record(RecordKind.BACKWARD_ENDED, self.iterations.number, event=BackwardEnded)
            with torch.no_grad():
                self._put_back()
        except StepRejected as rejected:
            self.iterations.drop(rejected, used=self.leave_gradients)
            return
        except BaseException as error:
            if self.iterations.failed(error):
                raise
            return
        self.order.note(self.machine.arrival)
        self.intake.ended()
        self.machine.finished()
        self.steps += 1
        number, steps = self.iterations.number, self.steps
        self.iterations.ended()
        self.events.record(RecordKind.STEP_ENDED, number, event=lambda time, rank: StepEnded(time, rank, steps))

    def _put_back(self) -> None:
        results = self.reductions.wait()
        changed = self.intake.compiled.changed()
        if changed:
            raise self.machine.late(changed)
        self._verify()
        unused = self.used.unused_everywhere(self.group)
        self.reductions.drop()
        self.reductions.put_back(results, unused, leave=self.leave_gradients)
        for future in self.wait_at_end:
            future.wait()
        self.wait_at_end.clear()
        for do in self.after_backward:
            do()

    def _verify(self) -> None:
        error = self.reductions.runner.verify(self.iterations.number)
        if error is not None:
            raise error

    def shadow_step_ended(self) -> None:
        """Take part in the end of a step of other ranks, without gradients of its own."""
        try:
            self._verify()
        except StepRejected as rejected:
            self.iterations.drop(rejected, used=self.leave_gradients)
            return
        first_of_static = self.used.learning_unused
        self.used.seen.clear()
        self.used.unused_everywhere(self.group)
        self.reductions.drop()
        if not first_of_static:
            self.order.learn()
        self.steps += 1
        self.iterations.number += 1

    def abandon(self, why: str) -> None:
        """Drop what was prepared for, or has arrived in, a backward that will not be averaged."""
        self._outputs_reached = False
        if self.iterations.survive is None:
            self.used.seen.clear()
        elif self.machine.state is _RESTING:  # gradients of earlier batches of the step remain
            self.catch_up()
        self.intake.abandon()
        self.machine.abandon(why)
        self.reductions.drop()

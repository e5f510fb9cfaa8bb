"""The reducer: gradients of one model on one rank, from "ready" to "averaged and back in .grad".

It carries out what the state machine decides, with real gradients, buckets and reductions. It does not know where a hook came
from, which flags a user passed, or what a module is.

Note [The parts of a step]
`machine.py` counts gradients down to launches. `listening.py` chooses for each step how gradients are reported, `arrivals.py`
carries that out and turns what is reported into launches. `bucket_buffers.py` holds the memory, `reductions.py` launches
buckets and puts averages back, with a `hook_runner.py` that reduces them. `iterations.py` fails a step on all ranks together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd.backward_end import at_backward_end
from gradwire.collectives import broadcast
from gradwire.errors import GradwireError
from gradwire.events import BackwardEnded, Emitter, GradientReady, StepEnded
from gradwire.groups.base import Group
from gradwire.recorder.flight_recorder import RecordKind
from gradwire.reducer.buckets.buffers import Buckets
from gradwire.reducer.buckets.layout import BucketLayout
from gradwire.reducer.intake.arrivals import Arrivals, GradListener
from gradwire.reducer.intake.awaited_gradients import AwaitedGradients
from gradwire.reducer.intake.bucket_order import BucketOrder
from gradwire.reducer.intake.compiled_reports import CompiledReports
from gradwire.reducer.intake.used_parameters import UsedParameters
from gradwire.reducer.iterations import Iterations
from gradwire.reducer.machine import Launch, Machine, State
from gradwire.reducer.reductions import Reductions, Runner, StepRejected
from gradwire.reducer.status import ReducerStatus

_RESTING = State.RESTING  # to look up a member of an Enum takes ten times as long, and this is asked for every gradient
_ARMED = State.ARMED


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """How a reducer treats gradients and buckets. The defaults are those of torch's DDP."""

    keep_views: bool = False
    """Gradients are views of the buckets after a step."""
    lazy_buckets: bool = False
    """Bucket memory is allocated at launch and released at the end of the step."""
    track_unused: bool = False
    """Ranks exchange in every step which parameters they used."""
    skip_unused: bool = False
    """Buckets none of whose parameters are used are not reduced."""
    rebuild_limits: Sequence[int] | None = None
    """Sizes in bytes of the buckets that are built after the first step, when the order of gradients is known."""


class Reducer:
    """Reduces the gradients of one model on one rank."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        layout: BucketLayout,
        *,
        group: Group,
        runner: Runner,
        options: ReducerOptions | None = None,
    ) -> None:
        options = options or ReducerOptions()
        self.parameters = list(parameters)
        self.device = self.parameters[0].device
        self.group = group
        self.events = Emitter()
        self.steps = 0
        self.manual = False
        """Whether the owner calls `finish` after the last launch, instead of the end of backward."""
        self.may_poll = False
        """Whether only the engine writes to `.grad` during backward, and the owner calls `backward_begins` when polling."""
        self.leave_gradients = False
        """Whether averages are not put back, as an optimizer has used them in backward."""
        self.after_backward: list[Callable[[], None]] = []
        self.wait_at_end: list[torch.futures.Future[Any]] = []
        self.machine = Machine(layout.members, [s.name for s in layout.parameters], rank=group.rank)
        self.buckets = Buckets(parameters, layout, keep_views=options.keep_views, lazy=options.lazy_buckets)
        self.order = BucketOrder(layout.parameters, options.rebuild_limits)
        self.used = UsedParameters(len(parameters), track=options.track_unused, device=self.device)
        self.listener = GradListener(parameters)
        self.reductions = Reductions(group, runner, self.buckets, self.listener, self.events)
        self.iterations = Iterations(self.parameters, group, self.machine, abandon=self._abandon)
        self._arrivals = Arrivals(self.machine, self.listener, self.buckets, self.order)
        self._awaited = AwaitedGradients(self.machine, self.listener, self.iterations, self.used)
        self.compiled_reports = CompiledReports(self.listener.compiled, self)
        self._skip_unused = options.skip_unused
        self._first_layout = layout
        self._end_is_queued = False
        self.buckets.allocate(layout, group)

    @property
    def layout(self) -> BucketLayout:
        """Which parameter lies in which bucket."""
        return self.buckets.layout

    @property
    def status(self) -> ReducerStatus:
        """A snapshot for the owner."""
        order = self.order
        return ReducerStatus(
            state=self.machine.state,
            steps=self.steps,
            layout=self.layout,
            rebuilt=order.rebuilt,
            rebuild_due=order.limits is not None and not order.rebuilt,
            learning=self.used.learning,
            order=tuple(order.names(self.layout)),
            last_arrival=tuple(order.last_arrival),
            graph_seems_static=order.graph_seems_static,
            unused_nbytes=order.unused_nbytes() if self.steps else 0,
            buckets_reduced=self.reductions.number,
            last_error=self.iterations.last_error,
        )

    # -- between steps -------------------------------------------------------------------------------------------------

    def rebuild(self) -> bool:
        """After the first step: assign the parameters to buckets in the order in which rank 0's gradients arrived."""
        if self.machine.state is State.RUNNING:
            return False
        layout = self.order.rebuild(self.group, self.device)
        if layout is None:
            return False
        self._use_layout(layout)
        self.order.rebuilt = True  # not before: memory may be short, and the next forward tries again
        return True

    def _use_layout(self, layout: BucketLayout) -> None:
        self.machine.abandon("buckets are rebuilt")
        self.machine.relayout(layout.members)
        self.buckets.allocate(layout, self.group)
        self.listener.listening.forget()
        self.reductions.runner.buckets_changed()

    def start_over(self) -> None:
        """After a failed step: begin as after construction, with rank 0's count of steps.

        Ranks fail at different points: some have finished the step, some know the order in which gradients arrived or what a
        static graph uses, some have rebuilt their buckets, and some have not. So all go back to the first buckets and learn
        the rest again, together.
        """
        self.machine.abandon("the group was recovered")
        self._drop()
        self.iterations.failure = None
        self.wait_at_end.clear()
        steps = torch.tensor([self.steps], device=self.device)
        self.group.submit(broadcast(steps, src=0, label="recovery")).wait()
        self.steps = int(steps.item())
        self.used.reset()
        self.order.forget()
        if self.layout is not self._first_layout:
            self._use_layout(self._first_layout)
        if self.used.learning or self.machine.static_uses is not None:
            self.learn_static_graph()

    def move_to_group(self, group: Group) -> None:
        """Use another group from the next step on, and learn the order of buckets again."""
        self.group = self.iterations.group = self.reductions.group = group
        self.machine.abandon("the group was exchanged")
        self.order.forget()

    def learn_static_graph(self) -> None:
        """Count uses in the next backward and reduce at its end; from then on expect the same."""
        self.used.learn_static_graph()
        self.machine.static_uses = None

    def prepare(self, unused: Iterable[int] = ()) -> None:
        """A forward has ended whose backward is to be synchronized."""
        self.catch_up()
        unused = list(unused)
        try:
            self.machine.prepare(unused)
        except GradwireError as error:
            self.iterations.fail_forward(error)
            raise
        self._drop()
        self.listener.compiled.clear()
        self.reductions.unused = frozenset(unused) if self._skip_unused else ()
        self.iterations.forward_ended()
        self.reductions.step = self.iterations.number
        self.used.forget_first_uses()
        static = self.machine.static_uses is not None
        self._arrivals.prepare(
            need_all=not self.order.rebuilt or self.used.needs_all or static or bool(self.events),
            can_poll=self.may_poll and not self.leave_gradients and not self.listener.compiled.enabled,
            at_once=self.events.wants(GradientReady),
        )

    # -- during backward -----------------------------------------------------------------------------------------------

    def on_ready(self, index: int, *, reported: bool = False) -> None:
        """The gradient of parameter `index` has been accumulated, or compiled code has `reported` it and it will be."""
        if not reported and index in self.listener.compiled.reported:
            return
        if self.listener.arrived:
            self.catch_up()
        machine, used = self.machine, self.used
        if used.needs_all and (reported or self.parameters[index].grad is not None):
            used.seen(index)
        if machine.state is _RESTING:
            if self.iterations.failure is not None:
                raise self.iterations.failure
            return
        if self.events:
            self.events.emit(GradientReady(time.perf_counter(), self.group.rank, machine.names[index], index))
        if used.needs_all and used.learning:
            used.count(index)
            self.backward_begins()  # if nothing could report it before: no output was found to put the sink behind
            return
        if machine.state is _ARMED and self.listener.listening.watching:
            self.listener.at_end(self._graph_task_ended)
            self.reductions.forget_gradients()
            self.listener.first_arrived(index)
        self._launch(self._arrivals.called, index)

    def catch_up(self) -> None:
        """Count the gradients that have arrived without a call."""
        if self.listener.arrived:
            self._launch(self._arrivals.uncalled)

    def fall_back(self) -> None:
        """Be called for every gradient still to come, and count those that are there."""
        self._launch(self._arrivals.fall_back)

    def _graph_task_ended(self) -> None:
        self._launch(self._arrivals.graph_task_ended)

    def backward_begins(self) -> None:
        """A backward has begun. If it is the first one of a static graph, reduce at its end; when polling, look then."""
        if self.used.learning and not self._end_is_queued:
            self._end_is_queued = True
            at_backward_end(self._finish_first_static_step)
        elif self.listener.listening.polling:
            self.listener.at_end(self._graph_task_ended)

    def _finish_first_static_step(self) -> None:
        """At the end of the first backward of a static graph: reduce everything, and remember how often each was used."""
        self._end_is_queued = False
        uses = self.used.take_first_uses()
        if not uses:
            return  # this was `torch.autograd.grad`, which accumulates nothing: the backward is still to come
        machine, everything = self.machine, range(len(self.parameters))
        machine.prepare(i for i in everything if i not in uses)
        # In the order in which they arrived first.
        launches = [launch for i in uses for launch in machine.grad_ready(i)]
        machine.static_uses = [uses.get(i, 0) for i in everything]
        try:
            self.reductions.launch(launches)
        except BaseException as error:
            self.iterations.fail(error)
            raise
        machine.arrival = []  # as in torch, the order is taken from the second step of a static graph
        if machine.complete and not self.manual:
            self.finish()

    def _launch(self, find: Callable[..., Sequence[Launch]], *args: Any) -> None:
        """Launch the buckets that `find(*args)` returns, except that the last one of a step waits for the end of backward.

        Until then this rank's backward may still fail, even after its last gradient. As no other rank can finish the step
        without the last bucket, all of them fail it together: see [Iterations] in `iterations.py`.
        """
        try:
            launches = find(*args)
            if not launches:
                return
            if self.manual or not launches[-1].last:
                self.reductions.launch(launches)
                return
            self.reductions.hold(launches[-1])
            self.reductions.launch(launches[:-1])
        except BaseException as error:
            self.iterations.fail(error)
            raise
        if not self._end_is_queued:
            self._end_is_queued = True
            at_backward_end(self.finish)

    # -- the end of backward -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the reductions and put the averages back into `.grad`."""
        self.catch_up()
        try:
            self.reductions.launch_held()
            if self.events:
                self.events.emit(BackwardEnded(time.perf_counter(), self.group.rank))
            self.iterations.record(RecordKind.BACKWARD_ENDED)
            with torch.no_grad():
                self._put_back()
        except StepRejected as rejected:
            self.iterations.drop(rejected, used=self.leave_gradients)
            return
        except BaseException as error:
            self.iterations.fail(error)
            raise
        listening = self.listener.listening
        if not listening.polling:  # else all have arrived, and their order was not seen
            self.order.note(self.machine.arrival)
        listening.ended()
        self.listener.compiled.clear()
        self.reductions.forget_gradients()
        self.machine.finished()
        self.steps += 1
        self.iterations.record(RecordKind.STEP_ENDED)
        self.iterations.ended()
        if self.events:
            self.events.emit(StepEnded(time.perf_counter(), self.group.rank, self.steps))

    def _put_back(self) -> None:
        reductions, listening = self.reductions, self.listener.listening
        results = reductions.wait()
        early = self.listener.compiled.changed()
        if early:
            raise self.machine.late(early)
        changed = reductions.changed() if listening.watching else []
        if changed:
            listening.mark_irregular()
            if listening.polling:
                raise self.machine.late([self.listener.index_of(p) for p in changed])
        reductions.verify(self.iterations.number)
        unused = self.used.unused_everywhere(self.group)
        self._drop()
        reductions.put_back(results, unused, leave=self.leave_gradients)
        for future in self.wait_at_end:
            future.wait()
        self.wait_at_end.clear()
        for do in self.after_backward:
            do()

    def shadow_step_ended(self) -> None:
        """Take part in the end of a step of other ranks, without gradients of its own."""
        try:
            self.reductions.verify(self.iterations.number)
        except StepRejected as rejected:
            self.iterations.drop(rejected, used=self.leave_gradients)
            return
        first_of_static = self.used.learning_unused
        self.used.reset()
        self.used.unused_everywhere(self.group)
        self._drop()
        if not first_of_static:
            self.order.note_shadow_step()
        self.steps += 1
        self.iterations.number += 1

    def _abandon(self, why: str) -> None:
        """The step has failed: forget it on this rank."""
        self.listener.abandon()
        self.reductions.forget_gradients()
        self.machine.abandon(why)
        self._drop()
        self.used.reset()

    def _drop(self) -> None:
        self.reductions.drop()
        self._end_is_queued = False

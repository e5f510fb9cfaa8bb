"""The performer: carries out what the machine says, with real gradients, buckets and reductions.

It knows parameters, storage and a `launch` function that starts reducing one bucket. It does not know where a hook came from,
which flags a user passed, or what a module is.

Note [Quiet gradients]
To be called for every gradient is what costs most: by the time the next one comes the engine has pushed this code out of the
caches, so a call takes 5 to 10 microseconds on a slow core. All but a few of these calls change nothing: in a step like the
last one, buckets are launched when the same gradients come. So once a step has shown which these are, the closers, all others
only append their parameter to `arrived`, which takes no Python at all, and the machine is told of them, in their order, when
a closer comes, when backward ends and when a new step begins. It misses nothing and nothing is launched later: only a
bucket's own closer can fill it, and when a closer launches other buckets than last time, the order has changed and every
gradient speaks for itself until the end of the step.

On the CPU most programs get on with still less: see [Silent gradients] in `watch.py`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from gradwire.autograd.ending import at_the_end
from gradwire.autograd.failed import before_compiled_backward, on_failed_backward
from gradwire.autograd.graph import reachable_parameters, reaches_mark
from gradwire.collectives import all_reduce, broadcast
from gradwire.errors import CompiledAutograd, GradwireError, ReadyTwice
from gradwire.events import BackwardEnded, BucketFull, BucketLaunched, BucketReduced, Emitter, GradientReady, StepEnded
from gradwire.groups.base import Group
from gradwire.hooks.bucket import GradBucket
from gradwire.reducer.assign import by_size
from gradwire.reducer.drive import Pending
from gradwire.reducer.failed_step import reason
from gradwire.reducer.layout import BucketLayout, ParameterSpec
from gradwire.reducer.machine import Launch, Machine, State
from gradwire.reducer.storage import Storage, below_autograd
from gradwire.reducer.watch import Watch, all_there

_RESTING = State.RESTING  # to look up a member of an Enum takes ten times as long, and this is asked for every gradient

_ARMED = State.ARMED
_is_sparse = attrgetter("is_sparse")

Launcher = Callable[[GradBucket], Pending]
"""Starts the reduction of a bucket."""


class StepRejected(Exception):
    """Raised by a check in `before_put_back`, on every rank alike: the step is dropped, and the group stays as it is."""

    def __init__(self, error: GradwireError) -> None:
        super().__init__(str(error))
        self.error = error


class Ears(Protocol):
    """The hooks on the parameters. All of them call `Reducer.on_ready` until something else is said."""

    @property
    def may_be_silent(self) -> bool:
        """Whether `listen_only_to` makes the others cost nothing."""

    def listen_to_all(self) -> None:
        """Call for every gradient, perhaps one late, also for those still to come in a backward that is running."""

    def listen_to(self, few: Collection[int], /) -> None:
        """Call for these, and append the other parameters to `Reducer.arrived`: see [Quiet gradients]."""

    def listen_only_to(self, few: Collection[int], /) -> None:
        """Call for these, at once, and for no others: see [Silent gradients] in `watch.py`."""

    def settle(self) -> None:
        """Between two gradients: call now for those that have come and would be told of later."""


class Reducer:
    """Gradients of one model on one rank, from "ready" to "averaged and back in .grad"."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        specs: Sequence[ParameterSpec],
        members: Sequence[Sequence[int]],
        *,
        group: Group,
        launch: Launcher,
        keep_views: bool = False,
        track_unused: bool = False,
        rebuild_limits: Sequence[int] | None = None,
        skip_unused: bool = False,
        lazy_buckets: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.lazy_buckets = lazy_buckets
        """Whether bucket memory is allocated at launch and released at the end of the step."""
        self.manual = False
        """Whether the owner calls `finish` after the last launch, instead of the end of backward."""
        self.group = group
        self.launch = launch
        self.keep_views = keep_views
        self.track_unused = track_unused
        self.events = Emitter()
        self.rebuild_limits = rebuild_limits
        self.skip_unused = skip_unused
        self.leave_gradients = False
        self.rebuilt = False
        self.steps = 0
        self.iteration = 0
        """How many iterations have ended for the caller, averaged or failed: see [Iterations] in `failed_step.py`."""
        self.expects_backward = False
        """Whether there was a forward, synchronized or not, since the last step ended."""
        self.layout = BucketLayout.make(specs, members)
        self._first_layout = self.layout
        self.machine = Machine(members, [s.name for s in specs], rank=group.rank)
        self.on_relayout: list[Callable[[BucketLayout], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.wait_at_end: list[torch.futures.Future[Any]] = []
        self.before_put_back: list[Callable[[], None]] = []
        self.last_arrival: list[int] = []
        self.graph_seems_static = True
        self.buckets_reduced = 0
        self._used = torch.zeros(len(self.parameters), dtype=torch.int32, device="cpu")
        self._seen: list[bool] = [False] * len(self.parameters)
        self._pending: list[tuple[Launch, Pending]] = []
        self._held: Launch | None = None
        self._first_uses: dict[int, int] | None = None
        self._static_unused: frozenset[int] | None = frozenset()
        self._declared_unused: frozenset[int] = frozenset()
        self.last_error: str | None = None
        self._failed: BaseException | None = None
        self._callback_queued = False
        self._arrival: list[int] | None = None
        self.arrived: list[Tensor] = []
        self.ears: Ears | None = None
        self.may_be_silent = False
        """True if only the engine writes to `.grad` during backward, and `backward_begins` is called when `silent`."""
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._closers: dict[int, int] | None = None
        self._launched_by: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._watch = Watch(self.parameters)
        self._watching = False
        self._silent = False
        self._end_is_awaited = False
        self._unheard: list[list[int]] = []
        self._found: dict[int, list[Tensor | None]] = {}
        # What is still in it when a model is dropped would keep the parameters alive: their hooks know this list.
        weakref.finalize(self, self.arrived.clear).atexit = False
        on_failed_backward(self.backward_failed)
        before_compiled_backward(self._refuse_compiled)
        self._allocate()

    def _allocate(self) -> None:
        self._launched_by, self._expected = {}, {}
        self.storages = [Storage(spec, None if self.lazy_buckets else self.group) for spec in self.layout.buckets]
        self._members = [[self.parameters[i] for i in m] for m in self.layout.members]

    # -- between steps -------------------------------------------------------------------------------------------------

    def rebuild(self) -> bool:
        """After the first step: deal the parameters to buckets anew, in the order in which rank 0's gradients came."""
        arrival, limits = self._arrival, self.rebuild_limits
        if self.rebuilt or limits is None or arrival is None or self.machine.state is State.RUNNING:
            return False
        order = torch.tensor(arrival, dtype=torch.int64, device=self.parameters[0].device)
        self.group.submit(broadcast(order, src=0, label="bucket order")).wait()
        members = by_size(self.layout.parameters, limits, order=order.tolist())
        self._relayout(BucketLayout.make(self.layout.parameters, members))
        self.rebuilt = True
        return True

    def _relayout(self, layout: BucketLayout) -> None:
        self.machine.abandon("buckets are rebuilt")
        self.machine.relayout(layout.members)
        self.layout = layout
        self._allocate()
        for tell in self.on_relayout:
            tell(self.layout)

    @property
    def order(self) -> list[str]:
        """The names of the parameters in the order in which gradients come, once that is known: for `expect_order`."""
        known = [i for members in self.layout.members for i in members] if self.rebuilt else self._arrival or []
        return [self.layout.parameters[i].name for i in known]

    def expect_order(self, names: Sequence[str]) -> None:
        """Gradients will come in this order, as an earlier run has seen: have its buckets from the next step on.

        Every rank calls it; the order on rank 0 counts. Where the names are not this model's, the order is learnt in
        the first step as usual.
        """
        index = {spec.name: i for i, spec in enumerate(self.layout.parameters)}
        if not self.rebuilt and not self.learning and index.keys() == set(names):
            self._arrival = [index[name] for name in names]

    def forget_arrival(self) -> None:
        """Learn the order anew, and rebuild once more after the next step."""
        self.rebuilt = False
        self._arrival = None

    def prepare(self, unused: Iterable[int] = ()) -> None:
        """A forward has ended whose backward is to be synchronised."""
        self.catch_up()
        unused = list(unused)
        try:
            self.machine.prepare(unused)
        except GradwireError as error:
            self.fail_forward(error)
            raise
        self._declared_unused = frozenset(unused)
        self._drop_pending()
        self.forward_ended()
        if self._first_uses is not None:
            self._first_uses = {}  # a backward that failed may have counted some
        self._launched_by = {}
        self._choose_whom_to_hear()

    def _choose_whom_to_hear(self) -> None:
        """In the backward to come: all gradients, or a few of them and the rest quietly, or a few of them and no others."""
        closers, watch, ears = self._expected if self._may_be_quiet() else None, self._watch, self.ears
        self._watching = ears is not None and ears.may_be_silent and watch.patient and self._owns_gradients()
        self._silent = False
        if not self._watching:
            self._listen_to(closers)
        elif closers is None:
            self._listen_to(None)
        elif watch.plain and self._can_be_heard(closers) and watch.untouched():
            self._silent = True
            self._listen_only_to(closers)
        else:
            watch.surprises += 1
            self._listen_to(None)

    @property
    def silent(self) -> bool:
        """Whether most gradients of the backward to come will not be heard of: see [Silent gradients] in `watch.py`."""
        return self._silent

    def _may_be_quiet(self) -> bool:
        """Whether the last step has shown who launches, and nobody wants to know of every gradient at once."""
        known = self.rebuilt and bool(self._expected) and self.machine.static_uses is None
        return known and not self.events and not self.exchanges_used_map and self._first_uses is None

    def _owns_gradients(self) -> bool:
        """Whether only the engine and this reducer write to `.grad` during backward."""
        return self.may_be_silent and not self.leave_gradients

    def _can_be_heard(self, closers: Collection[int]) -> bool:
        """Whether hooks can be put on these: not while they are frozen."""
        return all(self.parameters[i].requires_grad for i in closers)

    def _listen_to(self, closers: dict[int, int] | None) -> None:
        """Be called for the gradients of these alone (for all: None) and find the rest in `arrived`."""
        if self.ears is None:
            return
        if closers is None and self.events.wants(GradientReady):
            self.ears.listen_only_to(range(len(self.parameters)))  # somebody wants to know when each comes
        elif closers is None:
            self.ears.listen_to_all()
        elif closers != self._closers:
            self.ears.listen_to(closers)
        self._closers = closers

    def _listen_only_to(self, closers: dict[int, int]) -> None:
        """Be called for the gradients of these, and look for the rest."""
        if self.ears is not None and closers != self._closers:
            self._closers = closers
            self._unheard = [[i for i in members if i not in closers] for members in self.layout.members]
            self.ears.listen_only_to(closers)

    def _drop_pending(self) -> None:
        self._found.clear()
        self._pending.clear()
        self._held = None
        self.before_put_back.clear()
        self._callback_queued = False

    def start_over(self) -> None:
        """After a failed step: begin as after construction, with rank 0's count of steps.

        Ranks fail at different points: some have finished the step, some know the order in which gradients came or what a
        static graph uses, some have rebuilt their buckets, and some have not. So all go back to the first buckets and learn
        the rest anew, together.
        """
        self.machine.abandon("the group was recovered")
        self._drop_pending()
        self._failed = None
        self.wait_at_end.clear()
        steps = torch.tensor([self.steps], device=self.parameters[0].device)
        self.group.submit(broadcast(steps, src=0, label="recovery")).wait()
        self.steps = int(steps.item())
        self._seen = [False] * len(self.parameters)
        self.forget_arrival()
        if self.layout is not self._first_layout:
            self._relayout(self._first_layout)
        if self.learning or self.machine.static_uses is not None:
            self.learn_static_graph()

    def move_to_group(self, group: Group) -> None:
        """Use another group from the next step on, and learn the order of buckets anew."""
        self.group = group
        self.machine.abandon("the group was exchanged")
        self.forget_arrival()

    def learn_static_graph(self) -> None:
        """Count uses in the next backward and reduce at its end; from then on expect the same."""
        self._first_uses = {}
        self._static_unused = None
        self.machine.static_uses = None

    @property
    def learning(self) -> bool:
        """Whether the next backward shows what a static graph uses."""
        return self._first_uses is not None

    # -- during backward -----------------------------------------------------------------------------------------------

    def on_ready(self, index: int) -> None:
        """The gradient of parameter `index` has been accumulated."""
        if self.arrived:
            self.catch_up()
        machine = self.machine
        if self.exchanges_used_map and self.parameters[index].grad is not None:
            self._seen[index] = True  # under no_sync too: what has accumulated there is reduced later
        if machine.state is _RESTING:
            if self._failed is not None:
                raise self._failed
            return
        if self.events:
            self.events.emit(GradientReady(time.perf_counter(), self.group.rank, machine.names[index], index))
        if self._first_uses is not None:
            self._first_uses[index] = self._first_uses.get(index, 0) + 1
            self.backward_begins()  # if nobody could say so before: no output was found to put the sink behind
            return
        if self._watching and machine.state is _ARMED:
            self._opened(index)
        if self._silent and self._closers is not None and index in self._closers:
            self._look(self._closers[index])
        try:
            launches = machine.grad_ready(index)
        except GradwireError as error:
            self._fail_with(error)
        if launches:
            self._launched_by[index] = len(launches)
            self._start(launches)
        if self._closers is not None and self._closers.get(index, 0) != len(launches):
            if self._silent:
                self.speak_up()
            self._listen_to(None)

    def catch_up(self) -> None:
        """Tell the machine of the gradients that came quietly: see [Quiet gradients]."""
        if self.arrived:
            quiet = self.arrived[:]
            del self.arrived[: len(quiet)]  # not clear(): another device's thread may append meanwhile
            index = self._index
            self._tell([index[id(parameter)] for parameter in quiet])

    def _tell(self, indices: Iterable[int]) -> None:
        """Gradients have come, in this order. Those of one bucket that follow each other are counted together."""
        for _, together in groupby(indices, self.machine.bucket_of.__getitem__):
            self._tell_together(list(together))

    def _tell_together(self, indices: Sequence[int]) -> None:
        """Gradients of one bucket have come, in this order."""
        try:
            launches = self.machine.all_ready(indices)
        except ReadyTwice as error:
            self._fail_with(error)
        if launches:
            self._launched_by[indices[-1]] = len(launches)
            self._start(launches)

    def forget_strays(self) -> None:
        """Let go of gradients that came quietly in a backward that is not reduced."""
        if self.machine.state is _RESTING:
            self.arrived.clear()

    # -- silence: see [Silent gradients] in watch.py -------------------------------------------------------------------

    def _opened(self, index: int) -> None:
        """The first gradient of a step that is heard of."""
        self._await_the_end()
        self._watch.opened(index, look=not self._silent)

    def _await_the_end(self) -> None:
        if not self._end_is_awaited:
            at_the_end(self._task_ended, lost=self._interrupted)
            self._end_is_awaited = True

    def _look(self, expected: int) -> None:
        """A gradient has come that filled this many buckets in the last step. Are the others of these there?"""
        machine = self.machine
        buckets = range(machine.next_bucket, min(machine.next_bucket + expected, len(self._members)))
        for bucket in buckets:
            self._found[bucket] = [p.grad for p in self._members[bucket]]
            if not all_there(self._found[bucket]):
                self.speak_up()
                return
        for bucket in buckets:
            self._tell_together(self._unheard[bucket])

    def speak_up(self) -> None:
        """Be no longer silent: hear of every gradient that is still to come, and count those that are there."""
        self._watch.surprised()
        self._found.clear()
        came = self._came_unheard()
        self._silent = False
        self._listen_to(None)
        self._tell(came)

    def _came_unheard(self) -> list[int]:
        """Parameters whose gradients are there and were not told of, in the order in which they came last time."""
        heard = self._closers or {}
        unknown = [i for i in self.last_arrival if i not in heard and not self.machine.is_ready(i)]
        return [i for i in unknown if self.parameters[i].grad is not None]

    def _task_ended(self) -> None:
        """A graph task has ended. If it has brought some gradients and not all, others may come in a later one."""
        self._end_is_awaited = False
        if self.ears is not None:
            self.ears.settle()
        running = self.machine.state is State.RUNNING
        self._watch.odd = self._watch.odd or running
        if self._silent and (running or (self.machine.state is _ARMED and self._came_unheard())):
            self.speak_up()

    def _interrupted(self) -> None:
        """A backward has failed: `backward_failed` is called next."""
        self._end_is_awaited = False

    def forward_ended(self) -> None:
        """A forward with a graph has ended: the step fails if its backward does."""
        self.expects_backward = True
        self._failed = None

    @property
    def begins_iteration(self) -> int:
        """Asked at the beginning of a forward: the number of its iteration."""
        unfinished = self.machine.state in (State.RUNNING, State.LAUNCHED)  # the last one ended without an error
        return self.iteration + unfinished

    def fail_forward(self, error: BaseException) -> None:
        """As `fail`, before or after a forward, whose iteration it is."""
        self.iteration = self.begins_iteration
        self.fail(error)

    def _refuse_compiled(self, tensors: Any) -> None:
        if self._is_of_this_model(tensors):
            raise CompiledAutograd(
                f"backward of a replicated model on rank {self.group.rank} under compiled autograd: it runs no callbacks at the "
                "end of a backward, so gradients would never be averaged. Set torch._dynamo.config.compiled_autograd = False; "
                "torch.compile of the model may stay."
            )

    def backward_failed(self, tensors: Any, error: BaseException) -> None:
        """A backward has raised `error`, in this model or in another: if it was of this one, the step has failed."""
        if self._is_of_this_model(tensors):
            self.fail(error)

    def _is_of_this_model(self, tensors: Any) -> bool:
        """Whether a backward from `tensors` is one that is expected."""
        return self.expects_backward and (
            bool(reachable_parameters(tensors, self.parameters)) or reaches_mark(tensors, self)
        )

    def backward_begins(self) -> None:
        """A backward has begun. If it is the first one of a static graph, reduce at its end; in silence, look then."""
        if self.learning and not self._callback_queued:
            self._at_the_end(weakref.WeakMethod(self.finish_first_static_step))
        elif self._silent:
            self._await_the_end()

    def _at_the_end(self, method: weakref.WeakMethod[Any]) -> None:
        """Call `method` when the backward now running, in this graph task, has ended."""
        self._callback_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _call(method))

    def finish_first_static_step(self) -> None:
        """At the end of the first backward of a static graph: reduce everything, and remember how often each was used."""
        self._callback_queued = False
        if not self._first_uses:
            return  # this was `torch.autograd.grad`, which accumulates nothing: the backward is still to come
        uses, self._first_uses = self._first_uses, None
        self.machine.prepare(i for i in range(len(self.parameters)) if i not in uses)
        launches = [
            launch for i in uses for launch in self.machine.grad_ready(i)
        ]  # in the order in which they came first
        self.machine.static_uses = [uses.get(i, 0) for i in range(len(self.parameters))]
        self._launch_all(launches)
        self.machine.arrival = []  # as in torch, the order is taken from the second step of a static graph
        if self.machine.complete and not self.manual:
            self.finish()

    def _start(self, launches: Sequence[Launch]) -> None:
        """Launch these buckets, but the last one of a step when backward has ended.

        Until then this rank's backward may still fail, after its last gradient too. As no other rank can finish the step
        without the last bucket, all of them fail it together: see [Iterations] in `failed_step.py`.
        """
        if self.manual or not launches[-1].last:
            self._launch_all(launches)
            return
        self._held = launches[-1]
        self._found.pop(self._held.bucket, None)  # it is looked at again when it is launched
        self._launch_all(launches[:-1])
        if not self._callback_queued:
            self._at_the_end(weakref.WeakMethod(self.finish))

    def _launch_all(self, launches: Sequence[Launch]) -> None:
        with torch.no_grad():
            try:
                for launch in launches:
                    if self.skip_unused and self._declared_unused.issuperset(self.layout.members[launch.bucket]):
                        continue
                    self._pending.append((launch, self._launch(launch)))
            except BaseException as error:
                self.fail(error)
                raise

    def _launch(self, launch: Launch) -> Pending:
        storage, members = self.storages[launch.bucket], self._members[launch.bucket]
        gradients = self._found.pop(launch.bucket, None) or [p.grad for p in members]
        if self.lazy_buckets:
            storage.allocate(self.group)
        if storage.buffer is None:
            buffer = _sparse(gradients[0], members[0])
        else:
            if self._watching:  # a sparse gradient is reduced where it is, and alone in its bucket, so always heard
                if launch is not self._held:
                    self._watch.launched(launch.bucket, members, gradients)
                elif not all_there(gradients):  # backward has ended: there is nothing left that could change them
                    self._watch.odd = True
            try:
                if self._silent and not self.keep_views:  # they are new, and nobody else has seen this buffer
                    storage.copy_in(gradients)
                else:
                    storage.take_in(gradients)
            except RuntimeError as error:
                storage.explain(gradients, error)
                raise
            buffer = storage.buffer
        spec = storage.spec
        if self.events:
            self.events.emit(
                BucketFull(time.perf_counter(), self.group.rank, launch.bucket, spec.names, buffer.numel())
            )
        bucket = GradBucket(spec, buffer, members, is_last=launch.last, views=storage.views or None)
        pending = self.launch(bucket)
        if self.events:
            self.events.emit(BucketLaunched(time.perf_counter(), self.group.rank, launch.bucket))
        return pending

    # -- the end of backward -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for the reductions and put the averages back into `.grad`."""
        if self.arrived:
            self.catch_up()
        if self._held is not None:
            self._launch_all([self._held])
            self._held = None
        if self.events:
            self.events.emit(BackwardEnded(time.perf_counter(), self.group.rank))
        with torch.no_grad():
            try:
                results = []
                for launch, pending in self._pending:
                    results.append((launch, pending.wait()))
                self.buckets_reduced = len(self._pending)
                if self._watching:
                    self._check_unchanged()
                self.run_checks()
                unused = self._unused_everywhere()
                self._drop_pending()
                for launch, result in results:
                    self._put_back(launch, result, unused)
                    if self.events:
                        self.events.emit(BucketReduced(time.perf_counter(), self.group.rank, launch.bucket))
                    if self.lazy_buckets:
                        self.storages[launch.bucket].release()
                for future in self.wait_at_end:
                    future.wait()
                self.wait_at_end.clear()
                for do in self.after_backward:
                    do()
            except StepRejected as rejected:
                self._drop_step(rejected.error)
                raise rejected.error from None
            except BaseException as error:
                self.fail(error)
                raise
        self._note_arrival()
        self._expected = self._launched_by
        if self._watching:
            self._watch.ended()
        self.machine.finished()
        self.steps += 1
        self.iteration += 1
        self.expects_backward = False
        if self.events:
            self.events.emit(StepEnded(time.perf_counter(), self.group.rank, self.steps))

    def _check_unchanged(self) -> None:
        """A gradient that has changed since its bucket was launched was launched too early."""
        changed = self._watch.changed()
        if changed and self._silent:
            raise self.machine.late([self._index[id(p)] for p in changed])

    def run_checks(self) -> None:
        """What is to be known of all results before any touches a gradient.

        Not earlier: a check that communicates while other buckets' hooks still do would meet them in another order on
        another rank.
        """
        for check in self.before_put_back:
            check()

    def _note_arrival(self) -> None:
        if self._silent:
            return  # all have come, and their order was not seen
        arrived = self.machine.arrival
        if self.last_arrival and arrived != self.last_arrival and set(arrived) != set(self.last_arrival):
            self.graph_seems_static = False
        self.last_arrival = arrived
        if self._arrival is None and not self.rebuilt and arrived:
            seen = set(arrived)
            self._arrival = arrived + [i for i in range(len(self.parameters)) if i not in seen]

    def shadow_step_ended(self) -> None:
        """Take part in the end of a step of other ranks, without gradients of its own."""
        self.run_checks()
        first_of_static = self._static_unused is None
        self._seen = [False] * len(self.parameters)
        self._unused_everywhere()
        self._drop_pending()
        if self._arrival is None and not self.rebuilt and not first_of_static:
            self._arrival = list(range(len(self.parameters)))  # any order will do, since rank 0's is taken
        self.steps += 1
        self.iteration += 1

    def unused_numel(self) -> int:
        """Bytes of parameters that got no gradient in the last step."""
        if not self.steps:
            return 0
        seen = set(self.last_arrival)
        return sum(spec.nbytes for i, spec in enumerate(self.layout.parameters) if i not in seen)

    def _unused_everywhere(self) -> frozenset[int]:
        """Which parameters no rank used: their gradients are left alone."""
        if not self.exchanges_used_map:
            return self._static_unused or frozenset()
        self._used = torch.tensor(self._seen, dtype=torch.int32, device=self.parameters[0].device)
        self.group.submit(all_reduce(self._used, label="used parameters")).wait()
        self._seen = [False] * len(self.parameters)
        unused = frozenset(i for i, ranks in enumerate(self._used.tolist()) if ranks == 0)
        if self._static_unused is None:
            self._static_unused = unused
        return unused

    @property
    def exchanges_used_map(self) -> bool:
        """Whether ranks tell each other at the end of this step what they used: always, or once for a static graph."""
        return self.track_unused or self._static_unused is None

    def used_map(self) -> Tensor:
        """How many ranks had a gradient for each parameter in the last step."""
        return self._used

    def _put_back(self, launch: Launch, result: Tensor, unused: frozenset[int]) -> None:
        if self.leave_gradients:
            return
        storage, indices = self.storages[launch.bucket], self.layout.members[launch.bucket]
        if storage.buffer is None:
            if indices[0] not in unused:
                self.parameters[indices[0]].grad = result
            return
        storage.put(result)
        members, views = self._members[launch.bucket], storage.views
        gradients = self._watch.now.pop(launch.bucket, None) or [p.grad for p in members]
        if unused:
            used = [k for k, i in enumerate(indices) if i not in unused]
            members, views = [members[k] for k in used], [views[k] for k in used]
            gradients = [gradients[k] for k in used]
        if self.keep_views:
            for parameter, grad, view in zip(members, gradients, views, strict=True):
                if grad is not view:
                    parameter.grad = view
        else:
            _copy_out(members, gradients, views)

    def fail(self, error: BaseException) -> None:
        """The step is lost: let go of what is in flight, and tell the other ranks, who may be waiting for this one.

        The group is aborted, so nobody hangs; before the next step all ranks recover it together.
        """
        iteration = self.iteration
        self._drop_step(error)
        if self.group.failure is None:
            self.group.abort(reason(iteration, self.group.rank, error))
        self.group.ledger.reported = self._failed = self.group.failure

    def _drop_step(self, error: BaseException) -> None:
        """Forget the step on this rank."""
        self.arrived.clear()
        self._watch.forget()
        self._silent = False
        self.last_error = f"{type(error).__name__}: {error}"
        self.machine.abandon(self.last_error)
        self._drop_pending()
        self._seen = [False] * len(self.parameters)
        self.iteration += 1
        self.expects_backward = False

    def _fail_with(self, error: GradwireError) -> NoReturn:
        self.fail(error)
        raise error


def _copy_out(parameters: Sequence[Tensor], gradients: list[Tensor | None], views: Sequence[Tensor]) -> None:
    """Copy `views` into the gradients; one that is absent, or sparse, becomes a tensor of its own."""
    places, values = gradients, views
    if not all_there(gradients) or any(map(_is_sparse, gradients)):
        kept = [k for k, grad in enumerate(gradients) if grad is not None and not grad.is_sparse]
        for k in set(range(len(gradients))).difference(kept):
            parameters[k].grad = views[k].clone()
        places, values = [gradients[k] for k in kept], [views[k] for k in kept]
    if places:
        with below_autograd():
            torch._foreach_copy_(places, values)  # type: ignore[arg-type]


def _call(weak: weakref.WeakMethod[Any]) -> None:
    method = weak()
    if method is not None:
        method()


def _sparse(grad: Tensor | None, parameter: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device).to_sparse(1)
    return grad.detach() if grad.is_sparse else grad.detach().to_sparse(1)

"""`Replica`: one rank's copy of a model whose gradients are averaged. The common core of `DistributedDataParallel` and
`replicate`, which are two faces of it.

It knows modules and policies. It does not know torch's flags (`ddp.py` turns them into policies), nor how buckets are filled
(`reducer`), nor how they travel (`hooks`, `groups`).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from gradwire.autograd.graph import mark_outputs, reachable_parameters
from gradwire.collectives import ReduceOp, all_reduce, broadcast
from gradwire.errors import GroupAborted, HookError, UsageError
from gradwire.events import Handle
from gradwire.groups.base import Group
from gradwire.groups.completion import name_of
from gradwire.hooks.base import CommHook, Turn
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.dense import mean
from gradwire.hooks.periodic.base import OuterHook, check_outer
from gradwire.interop.untraced import untraced_call
from gradwire.parallel.attach import attach_ready, hear_backward
from gradwire.parallel.broadcast import broadcast_coalesced
from gradwire.parallel.nonfinite import NonFiniteCheck
from gradwire.parallel.scale import ScaleChecked
from gradwire.parallel.sink import through_sink
from gradwire.parallel.trainable import check_engine_thread, check_not_aborted, trainable_parameters
from gradwire.parallel.unequal import warn_when_saved
from gradwire.policies import BucketMemory, Buckets, Buffers, Gradients, Graph, NonFinite, ScaleCheck, check_policies
from gradwire.reducer import BucketLayout, ParameterSpec, Reducer
from gradwire.reducer.agreement import compare_parameters
from gradwire.reducer.assign import by_size
from gradwire.reducer.drive import Driver, Pending
from gradwire.reducer.failed_step import failed_iteration
from gradwire.reducer.hook_agreement import load_together, odd_ones_out
from gradwire.reducer.hook_states import States, from_dict, to_dict
from gradwire.reducer.machine import State
from gradwire.reducer.outer_optimizer import OuterHalf, after_every_step, replace_handles
from gradwire.reducer.torch_hooks import TorchHook, TorchHookRun

_BROADCAST_BYTES = 250 * 2**20
_UNLIMITED = 2**62
_NO_STATE = mean()


class Replica:
    """One rank's copy of a model."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        hook: CommHook | None = None,
        buckets: Buckets | None = None,
        graph: Graph = Graph.ALL_USED,
        gradients: Gradients = Gradients.COPIES,
        buffers: Buffers = Buffers.EVERY_FORWARD,
        ignore: Collection[str] = (),
        scale_check: ScaleCheck | None = None,
        nonfinite: NonFinite = NonFinite.PASS,
        skip_unused: bool = False,
        sync_at_start: bool = True,
    ) -> None:
        check_policies(
            buckets=(buckets, Buckets | None),
            graph=(graph, Graph),
            gradients=(gradients, Gradients),
            buffers=(buffers, Buffers),
            scale_check=(scale_check, ScaleCheck | None),
            nonfinite=(nonfinite, NonFinite),
        )
        self._module = weakref.ref(module)
        self.group = group
        self.graph = graph
        self.buffers = buffers
        self.ignore = frozenset(ignore)
        self.sync = True
        self.weight = 1.0
        self.divisor: int | None = None
        self.hook: CommHook = hook or mean()
        check_outer(self.hook, "replicate")
        self.torch_hook: tuple[TorchHook, Any] | None = None
        self.scale_check = scale_check
        self.sink_clones = True
        self._buckets = buckets or Buckets()
        self._driver = Driver(group)
        self._states = States(self.hook)
        self._steps: dict[int, int] = {}
        self._outer: OuterHalf | None = None
        self._attended = False
        self._optimizer_handles: list[Handle] = []
        self._state_dict_handles: list[Handle] = []
        self._iterations_behind = 0
        self._loop_left = False
        self._recoveries = group.ledger.recoveries
        self.sync_buffers_next = True
        self._skip_unused = skip_unused
        self._has_buffers = any(n not in self.ignore for n, _ in module.named_buffers())
        self.names, self.parameters, specs = trainable_parameters(module, self.ignore)
        self._nonfinite = NonFiniteCheck(self.names) if nonfinite is NonFinite.RAISE else None
        check_engine_thread(group, self.parameters)
        if sync_at_start:
            check_not_aborted(group)
            compare_parameters(group, specs, device=self._device())
            self.broadcast_state()
        self.reducer = Reducer(
            self.parameters,
            specs,
            self._first_members(specs),
            group=group,
            launch=_weak_launch(self),
            keep_views=gradients is Gradients.VIEWS,
            track_unused=graph is Graph.FIND_UNUSED,
            rebuild_limits=None if graph is Graph.FIND_UNUSED else self._buckets.limits,
            skip_unused=skip_unused,
            lazy_buckets=self._buckets.memory is BucketMemory.DURING_BACKWARD,
        )
        self._check(self.hook)
        self.reducer.may_be_silent = True
        self.reducer.on_relayout.append(_weak_relayout(self))
        if graph is Graph.STATIC:
            self.reducer.learn_static_graph()
        self.handles = attach_ready(self.parameters, self.reducer, undefined_too=graph is not Graph.ALL_USED)
        self._start_afresh()

    @property
    def module(self) -> nn.Module:
        """The replicated module. It is held weakly: it, or its wrapper, owns this."""
        module = self._module()
        if module is None:
            raise UsageError("the replicated module is gone. Keep a reference to it.")
        return module

    def _device(self) -> torch.device:
        return self.parameters[0].device

    def _first_members(self, specs: list[ParameterSpec]) -> list[list[int]]:
        """Before any backward has shown the order, parameters are taken to become ready last to first."""
        known = self._buckets.from_start or self.graph is Graph.FIND_UNUSED
        limits = self._buckets.limits if known else (_UNLIMITED,)
        return by_size(specs, limits)[::-1]

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def set_hook(self, hook: CommHook) -> None:
        """Use another hook from the next step on. Every rank must call it, between the same steps, with an equal hook.

        Nothing that the hook before has not sent is lost: see Note [Another hook] in `reducer/hook_states.py`. After a
        hook that leaves gradients on their rank the parameters are averaged first.
        """
        check_outer(hook, "set_hook")
        self._check_between_steps(f"set_hook({hook!r})")
        with self.hears_of_failures():
            self.mend()
        self._check(hook)
        said = f"{hook!r} at step {self.reducer.steps}"
        odd = odd_ones_out(self.group, said, device=self._device(), label="set_hook")
        if odd:
            raise HookError(
                f"set_hook({hook!r}) at step {self.reducer.steps} on rank {self.group.rank}: ranks {odd} set another hook or "
                "are at another step. Nothing was changed; call it with equal hooks after the same step on every rank."
            )
        if self._outer is not None:
            self._outer.average()
        self.use_hook(hook)

    def _check(self, hook: CommHook) -> None:
        for spec in self.reducer.layout.buckets:
            hook.check(spec)

    def use_hook(self, hook: CommHook | tuple[TorchHook, Any]) -> None:
        """Use this hook; a function in torch's form comes with its state. See Note [Another hook] in `reducer/hook_states.py`."""
        own = hook if isinstance(hook, CommHook) else _NO_STATE
        check_outer(own, "register_comm_hook")
        outer, step = self._outer, self._step() if self._outer is None else self._outer.step
        saved = outer.state_dict() if outer is not None and own.structure == outer.hook.structure else None
        states = self._states.hand_over(own, step=step)
        self.hook, self.torch_hook = (hook, None) if isinstance(hook, CommHook) else (self.hook, hook)
        self.reducer.may_be_silent = self.torch_hook is None  # torch's hooks see parameters, and may write to `.grad`
        self._use(states, self._outer_half(states, saved))

    def _check_between_steps(self, doing: str) -> None:
        if self.reducer.machine.state in (State.RUNNING, State.LAUNCHED):
            raise HookError(f"{doing} during backward. Call it between steps.")

    def _start_afresh(self, step: int = 0) -> None:
        """The hook begins, without states; parameters are the same on every rank."""
        states = States(self.hook, step=step)
        self._use(states, self._outer_half(states))

    def _outer_half(self, states: States, saved: Mapping[str, Any] | None = None) -> OuterHalf | None:
        if self.torch_hook is not None or not isinstance(self.hook, OuterHook):
            return None
        named = zip(self.names, self.parameters, strict=True)
        return OuterHalf(self.hook, self.group, named, states=states, saved=saved)

    def _use(self, states: States, outer: OuterHalf | None) -> None:
        handles = []
        if outer is not None and (module := self._module()) is not None:
            handles = [warn_when_saved(module, outer)]
        replace_handles(self._state_dict_handles, handles)
        self._states, self._outer = states, outer
        self._steps.clear()
        if outer is not None:
            outer.attended = self._attended

    # -- hook states -----------------------------------------------------------------------------------------------------

    def hook_state_dict(self) -> dict[str, Any]:
        """The hook's state on this rank, by parameter name, for `torch.save`: each rank saves its own.

        `load_hook_state_dict` takes it in a world of any size: see Note [Whose state it is] in `reducer/hook_states.py`.
        """
        self._check_own_hook("hook_state_dict")
        if self._outer is not None:
            return self._outer.state_dict()
        return to_dict(self._states, rank=self.group.rank, step=self._step(), order=self.reducer.order)

    def load_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from a state that `hook_state_dict` gave. Every rank calls it, between steps, under a hook of the same structure.

        Settings, such as a ratio, may differ. Before the first step the buckets become those of the run that saved.

        A rank takes its own state whole; of another rank's, only what all ranks share, so a new rank loads that of rank 0.
        """
        self._check_own_hook("load_hook_state_dict")
        with self.hears_of_failures():
            self.mend()

        def build(states: States) -> tuple[States, OuterHalf | None]:
            if not isinstance(self.hook, OuterHook):
                states.rehearse(self.reducer.layout.buckets)
            return states, self._outer_half(states, saved)

        self._use(*load_together(saved, self.hook, self.group, device=self._device(), build=build))
        self.reducer.expect_order(saved.get("order", ()))

    def settings(self) -> dict[str, Any]:
        """The hook, its state and the weight, for a copy or a pickle of the model."""
        state = None if self.torch_hook is not None else self.hook_state_dict()
        return {"hook": self.torch_hook or self.hook, "state": state, "weight": self.weight}

    def restore(self, settings: Mapping[str, Any]) -> None:
        """Take `settings()` of the model this one was copied from. Local: one rank may make a copy without the others."""
        self.use_hook(settings["hook"])
        if settings["state"] is not None:
            states = from_dict(settings["state"], self.hook, rank=self.group.rank)
            self._use(states, self._outer_half(states, settings["state"]))
        self.weight = settings["weight"]

    def _check_own_hook(self, doing: str) -> None:
        self._check_between_steps(f"{doing}()")
        if self.torch_hook is not None:
            name = name_of(self.torch_hook[0])
            raise HookError(
                f"{doing}(): the model has the hook {name} in torch's form, which keeps its state itself. Save the state that you "
                "registered it with.",
                hook=name,
            )

    def _step(self) -> int:
        """How many times the buckets have been reduced."""
        return max(self._steps.values(), default=self._states.step)

    # -- outer steps -----------------------------------------------------------------------------------------------------

    def attach_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Have outer steps, of hooks such as `diloco`, after the steps of this optimizer (of several: when all have made one).

        Without an optimizer it only says that you call `outer_step()` after every step yourself. With other hooks it does nothing.
        A second call takes the place of the first: optimizers that were attached before tell of their steps no longer.
        """
        weak = weakref.ref(self)

        def stepped() -> None:
            owner = weak()
            if owner is not None:
                owner.outer_step()

        replace_handles(self._optimizer_handles, after_every_step(optimizers, self.parameters, stepped))
        self._attended = True
        if self._outer is not None:
            self._outer.attended = True

    def outer_step(self) -> None:
        """The optimizer has made a step: communicate, if the hook has an outer half and it is time. Every rank calls it."""
        if self._outer is None:
            return
        try:
            self._outer.optimizer_stepped()
        except BaseException as error:
            self.reducer.fail(error)
            raise

    def average_parameters(self) -> None:
        """Make the parameters their mean over all ranks: at the end of training with a hook that leaves them different."""
        with self.hears_of_failures():
            self.mend()
            if self._outer is not None:
                self._outer.average()

    def start(self, bucket: GradBucket) -> Pending:
        """Begin the reduction of one bucket."""
        if self._nonfinite is None:
            return self._start_hook(bucket)
        return self._nonfinite.around(bucket, self._start_hook, self.reducer)

    def _start_hook(self, bucket: GradBucket) -> Pending:
        number = bucket.index()
        step = self._steps.get(number, self._states.step)
        self._steps[number] = step + 1
        self._states.pay(bucket.spec, bucket.buffer())
        if self._outer is not None:
            return self._start_inner(bucket, self._outer)
        policy = self.scale_check
        if policy is None or step % policy.every:
            return self._start(bucket, step)
        name = repr(self.hook) if self.torch_hook is None else name_of(self.torch_hook[0])
        check = ScaleChecked(bucket, self.group, policy, hook=name, weight=self.weight)
        self.reducer.before_put_back.append(check.verify)
        return check.watch(self._start(bucket, step))

    def _start(self, bucket: GradBucket, step: int) -> Pending:
        if self.torch_hook is not None:
            hook, state = self.torch_hook
            return TorchHookRun(hook, state, bucket, self.group)
        return self.start_own(bucket, self.hook, step)

    def start_own(self, bucket: GradBucket, hook: CommHook, step: int = 0) -> Pending:
        """Begin a reduction with one of our hooks."""
        state = self._states.of(bucket.spec)
        return self._driver.launch(hook, bucket.buffer(), state, self._turn(bucket, step))

    def _start_inner(self, bucket: GradBucket, outer: OuterHalf) -> Pending:
        """The gradient half of a hook whose state is that of its outer half."""
        if bucket.index() == 0:
            outer.backward_begins()
        return self._driver.launch(outer.hook, bucket.buffer(), None, self._turn(bucket, outer.step))

    def _turn(self, bucket: GradBucket, step: int) -> Turn:
        return Turn(
            bucket.spec,
            self.group.rank,
            self.group.size,
            step,
            donated=True,
            divisor=self.divisor,
            weight=self.weight,
        )

    def move_states(self) -> None:
        """Buckets were rebuilt: hook states follow their parameters."""
        self._states.step = self._step()
        self._steps.clear()
        if self._outer is None:
            self._states.take_apart()

    # -- a step --------------------------------------------------------------------------------------------------------

    @untraced_call
    def before_forward(self) -> None:
        """Rebuild buckets if it is time, and make buffers equal."""
        with self.hears_of_failures():
            self.rebuild()
            if self.buffers is Buffers.EVERY_FORWARD and self.sync_buffers_next:
                self.sync_buffers()

    @contextlib.contextmanager
    def hears_of_failures(self) -> Iterator[None]:
        """What fails in here reaches this rank's caller, who need not be told of it again."""
        try:
            yield
        except BaseException as error:
            if self.group.failure is not None:
                self.reducer.fail_forward(error)
            raise

    def mend(self) -> None:
        """Recover from a step that failed, or raise its failure where this rank's caller has not heard of it.

        See [Iterations] in `reducer/failed_step.py`. The step may have been another model's on this group: whichever comes first
        recovers the group, and the others start over when they come.
        """
        failure, reducer, ledger = self.group.failure, self.reducer, self.group.ledger
        if failure is None:
            if self._recoveries != ledger.recoveries:
                self._start_over(reducer.begins_iteration)
                self._iterations_behind = 0  # whoever has recovered the group has made up for these
            self._raise_behind()
            return
        iteration = failed_iteration(failure)
        if ledger.reported is not failure:
            if iteration is None or reducer.begins_iteration <= iteration:
                raise failure
            reducer.last_error = str(failure)
            warnings.warn(
                f"rank {self.group.rank} had finished step {iteration} when it failed on another rank, so it goes on, and "
                f"parameters are taken from rank 0 ({failure}).",
                stacklevel=2,
            )
        self.recover()
        self._raise_behind()

    def _raise_behind(self) -> None:
        """Raise if this rank is to lose this iteration because others have: see [Iterations] in `reducer/failed_step.py`."""
        if self._iterations_behind:
            self._iterations_behind -= 1
            self.reducer.iteration += 1
            raise GroupAborted(
                f"step {self.reducer.iteration - 1} of {self.group}: other ranks have lost it, as they were in it when an "
                f"earlier one failed here ({self.reducer.last_error}). Nothing was averaged; the next step is in step with theirs.",
                reason="a step that other ranks have lost",
            )

    def rebuild(self) -> None:
        """Deal the parameters to buckets anew, once the first step has shown their order; first mend what a step broke."""
        self.mend()
        self.reducer.forget_strays()
        if torch.is_grad_enabled():
            self.reducer.rebuild()

    def forward_failed(self, error: BaseException) -> None:
        """The module's forward has raised: where a backward was to follow, the other ranks are not to wait for it."""
        if torch.is_grad_enabled():
            self.reducer.fail_forward(error)

    def step_failed(self, error: BaseException) -> None:
        """Fail the step on all ranks, because of an exception between forward and backward, which nobody else sees.

        To be called where that exception is caught; where the step has failed or ended already, it does nothing.
        """
        if self.reducer.expects_backward:
            self.reducer.fail(error)

    def loop_failed(self, error: BaseException) -> None:
        """A training loop that all ranks leave together has ended with `error` on this rank: end it on the others too."""
        if not self.group.closed:
            (self.reducer.fail if self.reducer.expects_backward else self.reducer.fail_forward)(error)
            self._loop_left = True

    @untraced_call
    def after_forward(self, output: Any) -> Any:
        """Expect the backward of this forward. Returns the output, which may have to pass through a sink."""
        if torch.is_grad_enabled():
            self.reducer.forward_ended()
            mark_outputs(output, self.reducer)
        if not (torch.is_grad_enabled() and self.sync):
            self.sync_buffers_next = False
            return output
        self.sync_buffers_next = True
        self.expect_backward(output)
        if self.graph is Graph.FIND_UNUSED or self.reducer.learning:
            return through_sink(self, output)
        return output

    def expect_backward(self, output: Any) -> None:
        """The next backward, from `output`, is to be averaged."""
        unused: list[int] = []
        if self.graph is Graph.FIND_UNUSED:
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                reached = reachable_parameters(output, self.parameters)
            unused = [i for i in range(len(self.parameters)) if i not in reached]
        self.reducer.prepare(unused)
        if self.reducer.silent and not hear_backward(output, self.reducer):
            self.reducer.speak_up()

    def recover(self) -> None:
        """After a step that failed on some rank: meet the others, and make the replicas equal again.

        Some ranks may have stepped their optimizer and some not, so parameters and buffers are taken from rank 0. Hooks
        start afresh, at rank 0's step: some ranks' states have seen the failed step and some not, and a hook may have been
        stopped halfway through writing one. What is lost with a residual is what was not sent yet, about one gradient.
        """
        begins = self.reducer.begins_iteration
        self._driver.drain(self.group.timeout)
        self.group.recover()
        self.group.ledger.recoveries += 1
        self._start_over(begins)

    def _start_over(self, begins: int) -> None:
        """The other half of `recover`, on a group that works again, in the iteration of the number `begins`."""
        self._recoveries = self.group.ledger.recoveries
        self._driver.drain(self.group.timeout)
        iteration = torch.tensor([begins], device=self._device())
        self.reducer.iteration = begins
        self.group.submit(all_reduce(iteration, op=ReduceOp.MAX, label="recovery")).wait()
        latest = int(iteration.item())
        if self._loop_left:  # all ranks begin a new loop, wherever they were in the old one
            self.reducer.iteration, self._loop_left = latest, False
        self._iterations_behind = latest - self.reducer.iteration
        step = self._step() if self._outer is None else self._outer.step
        self.reducer.start_over()
        self.broadcast_state()
        agreed = torch.tensor([step], device=self._device())
        self.group.submit(broadcast(agreed, src=0, label="recovery")).wait()
        self._start_afresh(int(agreed.item()))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    # -- parameters and buffers ------------------------------------------------------------------------------------------

    def named_buffers(self) -> dict[str, Tensor]:
        """The module's buffers, looked up anew each time: modules may reassign them.

        As in torch, a module that had none when it was replicated is not searched again: that takes as long as a bucket.
        """
        if not self._has_buffers:
            return {}
        return {n: b for n, b in self.module.named_buffers() if n not in self.ignore}

    def sync_buffers(self, src: int = 0) -> None:
        """Make buffers equal to those of `src`, without disturbing what autograd has saved of them."""
        buffers = list(self.named_buffers().values())
        if buffers:
            with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
                broadcast_coalesced(self.group, buffers, buffer_size=_BROADCAST_BYTES, src=src)

    def broadcast_state(self, src: int = 0) -> None:
        """Make parameters, and buffers unless they are never synchronised, equal to those of `src`."""
        tensors: list[Tensor] = [p for n, p in self.module.named_parameters() if n not in self.ignore]
        if self.buffers is not Buffers.NEVER:
            tensors += list(self.named_buffers().values())
        broadcast_coalesced(self.group, tensors, buffer_size=_BROADCAST_BYTES, src=src)

    def become_static(self) -> None:
        """The graph will not change from now on: learn it in the next step."""
        self.graph = Graph.STATIC
        self.reducer.track_unused = False
        self.reducer.rebuild_limits = self._buckets.limits
        self.reducer.learn_static_graph()
        for handle in self.handles:
            handle.remove()
        self.handles = attach_ready(self.parameters, self.reducer, undefined_too=True)

    def check_finished(self) -> None:
        """Raise if the last backward did not reduce every bucket."""
        self.reducer.catch_up()
        machine = self.reducer.machine
        if machine.state in (State.RUNNING, State.LAUNCHED):
            raise machine.unfinished()

    def move_to_group(self, group: Group) -> None:
        """Go on with other ranks. Every rank of the new group calls it, between steps."""
        self.group = group
        self._recoveries = group.ledger.recoveries
        self._driver.close()
        self._driver = Driver(group)
        self.reducer.move_to_group(group)
        if self._outer is not None:
            self._outer.group = group
            self._outer.average()
        self._start_afresh()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle of a replicated module is an ordinary module: None stands in this one's place."""
        return type(None), ()

    def detach(self) -> None:
        """Take our hooks off the parameters: the module is an ordinary one again."""
        for handle in [*self.handles, *self._optimizer_handles, *self._state_dict_handles]:
            handle.remove()
        self.handles, self._optimizer_handles, self._state_dict_handles = [], [], []
        self._driver.close()


def _weak_launch(replica: Replica) -> Callable[[GradBucket], Pending]:
    """`replica.start` without a cycle through the reducer."""
    weak = weakref.ref(replica)

    def launch(bucket: GradBucket) -> Pending:
        owner = weak()
        if owner is None:
            raise UsageError(f"bucket {bucket.index()}: its model is gone.")
        return owner.start(bucket)

    return launch


def _weak_relayout(replica: Replica) -> Callable[[BucketLayout], None]:
    weak = weakref.ref(replica)

    def relayout(layout: BucketLayout) -> None:
        owner = weak()
        if owner is not None:
            owner.move_states()

    return relayout

"""`Replica`: one rank's copy of a model whose gradients are averaged. The common core of `DistributedDataParallel` and `replicate`.

It handles modules and policies. It does not know torch's flags (`ddp.py` turns them into policies), how buckets are filled and
reduced (`reducer`), or how they are communicated (`hooks`, `groups`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradwire.autograd.compiled.install import forward_begins
from gradwire.autograd.grad_hooks import on_backward
from gradwire.autograd.graph import mark_outputs, reachable_parameters
from gradwire.errors import LayoutError
from gradwire.events import ForwardBegan, ForwardEnded
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook
from gradwire.hooks.dense import mean
from gradwire.hooks.periodic.base import check_outer
from gradwire.parallel.agreement import Agreement
from gradwire.parallel.divergence import DivergenceSchedule
from gradwire.parallel.hook_controls import HookControls
from gradwire.parallel.module_state import ModuleState
from gradwire.parallel.recovery import Recovery
from gradwire.parallel.trainable import check_engine_thread, check_hooked, check_not_aborted, trainable_parameters
from gradwire.policies import (
    BucketMemory,
    Buckets,
    Buffers,
    Gradients,
    Graph,
    NonFinite,
    ScaleCheck,
    check_policies,
    default_checks,
)
from gradwire.recorder.format import RecordKind
from gradwire.reducer import BucketLayout, Reducer, ReducerOptions
from gradwire.reducer.buckets.layout import ParameterSpec, by_size
from gradwire.reducer.checks.nonfinite import NonFiniteChecked, NonFiniteWatch
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.hook.torch_hooks import TorchHook
from gradwire.reducer.machine import State
from gradwire.reducer.rank_agreement import compare_parameters
from gradwire.runtime.dynamo import untraced_call


@functools.cache
def _keep_freed_memory() -> None:
    """Of what is freed, glibc keeps twice the largest block, up to 32 MiB, that it has mapped and freed, and gives the rest back to
    the system: gradients and temporaries of the optimizer would be mapped and cleared again in every step."""
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True, slots=True)
class ReplicaPolicies:
    """How a model is replicated: the policies of `gradwire.policies`, and what is excluded."""

    buckets: Buckets = field(default_factory=Buckets)
    graph: Graph = Graph.ALL_USED
    gradients: Gradients = Gradients.COPIES
    buffers: Buffers = Buffers.EVERY_FORWARD
    scale_check: ScaleCheck | None = None
    nonfinite: NonFinite | None = None
    """None: that of `gradwire run --nonfinite`, else PASS."""
    ignore: Collection[str] = ()
    """Names of parameters and buffers that are left to the caller."""
    skip_unused: bool = False
    """Whether to skip the reduction of buckets without any used parameter."""

    def __post_init__(self) -> None:
        check_policies(
            buckets=(self.buckets, Buckets),
            graph=(self.graph, Graph),
            gradients=(self.gradients, Gradients),
            buffers=(self.buffers, Buffers),
            scale_check=(self.scale_check, ScaleCheck | None),
            nonfinite=(self.nonfinite, NonFinite | None),
        )


class Replica(HookControls):
    """One rank's copy of a model."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        hook: CommHook | None = None,
        policies: ReplicaPolicies | None = None,
        sync_at_start: bool = True,
    ) -> None:
        _keep_freed_memory()
        policies = policies or ReplicaPolicies()
        hook = hook or mean()
        check_outer(hook, "replicate")
        self.group, self.graph, self._policies = group, policies.graph, policies
        self.sync = self.sync_buffers_next = self.sink_clones = True
        self.names, self.parameters, specs = trainable_parameters(module, frozenset(policies.ignore))
        self.state = ModuleState(module, group, buffers=policies.buffers, ignore=policies.ignore)
        check_engine_thread(group, self.parameters)
        if sync_at_start:
            check_not_aborted(group)
            compare_parameters(group, specs, device=self.parameters[0].device)
            self.state.broadcast()
        layout = self._first_layout(hook, specs)
        self.runner = HookRunner(hook, group, zip(self.names, self.parameters, strict=True))
        self.runner.scale_check = policies.scale_check
        self.reducer = Reducer(
            self.parameters,
            layout,
            group=group,
            runner=self.runner,
            options=ReducerOptions(
                keep_views=policies.gradients is Gradients.VIEWS,
                lazy_buckets=policies.buckets.memory is BucketMemory.DURING_BACKWARD,
                track_unused=self.graph is Graph.FIND_UNUSED,
                skip_unused=policies.skip_unused,
                limits=tuple(policies.buckets.limits),
            ),
        )
        self._choose_checks(specs)
        self.divergence = DivergenceSchedule(default_checks().check_divergence)
        self.recovery = Recovery(self.reducer, self.runner, self.state)
        self.agreement = Agreement(self.reducer, self.recovery)
        self.handles: list[Any] = []
        """Handles of the module hooks that other objects have registered for this replica."""
        if self.graph is Graph.STATIC:
            self.reducer.learn_static_graph()
        known = self.state, self.names, self.parameters, self.reducer.intake
        self._check_hooked = functools.partial(check_hooked, *known)
        self.reducer.incomplete = self._check_hooked
        self._last_unused: list[int] = []
        self.reducer.attach()
        self.state.warn_when_saved(None if self.runner.outer is None else self.runner)

    replica = property(lambda self: self)
    """For the HookControls that it shares with DistributedDataParallel."""

    @property
    def module(self) -> nn.Module:
        """The replicated module. It is held weakly: it, or its wrapper, owns this."""
        return self.state.module

    def _first_layout(self, hook: CommHook, specs: list[ParameterSpec]) -> BucketLayout:
        """Buckets before any backward has shown the order: gradients are assumed to become ready from the last to the first."""
        buckets = self._policies.buckets
        known = buckets.from_start or self.graph is Graph.FIND_UNUSED
        limits = buckets.limits if known else (2**62,)  # one bucket
        layout = BucketLayout.make(specs, by_size(specs, limits)[::-1])
        for spec in layout.buckets:
            hook.check(spec)
        return layout

    def _choose_checks(self, specs: list[ParameterSpec]) -> None:
        policy = self._policies.nonfinite or default_checks().nonfinite
        overwritten, reductions = self._policies.gradients is Gradients.VIEWS, self.reducer.reductions
        self.checks: NonFiniteChecked | None = None
        reductions.runner, reductions.first_nonfinite = self.runner, None
        if policy is not NonFinite.PASS:
            reductions.runner = self.checks = NonFiniteChecked(self.runner, specs, policy, overwritten=overwritten)
        elif specs[0].device.type == "cpu":
            reductions.first_nonfinite = NonFiniteWatch([s.name for s in specs])

    def _follow_conversion(self) -> None:
        """Parameters have another dtype or device than when they were hooked: begin again with new hooks and new buckets. Hooks
        begin without states, as in a model that was converted before it was replicated."""
        old = self.reducer.layout.parameters
        named = zip(self.names, self.parameters, old, strict=True)
        specs = [ParameterSpec.of(name, parameter, sparse=spec.sparse) for name, parameter, spec in named]
        check_engine_thread(self.group, self.parameters)
        compare_parameters(self.group, specs, device=self.parameters[0].device)
        self.finish_checks()
        self.reducer.begin_again(self._first_layout(self.runner.hook, specs))
        self.runner.start_over(self.runner.step)
        self._choose_checks(specs)

    # -- the hook ------------------------------------------------------------------------------------------------------

    @property
    def hook(self) -> CommHook:
        """The gradwire hook, unless a torch-style hook has been registered."""
        return self.runner.hook

    def use_hook(self, hook: CommHook | tuple[TorchHook, Any]) -> None:
        """Use this hook on this rank; a torch-style hook is given with its state."""
        self.runner.replace(hook)
        self.state.warn_when_saved(None if self.runner.outer is None else self.runner)

    def settings(self) -> dict[str, Any]:
        """The hook, its state and the weight, for a copy or a pickle of the model."""
        torch_hook = self.runner.torch_hook
        state = None if torch_hook is not None else self.hook_state_dict()
        order = self.reducer.order.names(self.reducer.layout) if self.reducer.order.rebuilt else None
        return {"hook": torch_hook or self.hook, "state": state, "weight": self.runner.weight, "order": order}

    def restore(self, settings: Mapping[str, Any]) -> None:
        """Apply `settings()` of the model this one was copied from. Local: one rank may make a copy without the others."""
        if settings["order"] is not None and not self.reducer.used.learning:
            self.reducer.rebuild(order=settings["order"])  # in the first buckets a hook may choose other elements
        self.use_hook(settings["hook"])
        if settings["state"] is not None:
            self.runner.restore(settings["state"])
        self.runner.weight = settings["weight"]

    # -- a step --------------------------------------------------------------------------------------------------------

    @untraced_call
    def before_forward(self, exchange: Callable[[], object] | None = None) -> None:
        """Rebuild buckets if due, and make buffers equal, or call `exchange`, which does both."""
        if self.recomputing:
            return
        self.reducer.events.record(RecordKind.FORWARD_BEGAN, self.reducer.iterations.number)
        self.agreement.before_forward(averaged=self.sync and self.module.training)
        with self.recovery.failing_forward():
            (exchange or self._exchange)()
        self.divergence.before_forward(self.module, self.runner, steps=self.reducer.steps, sync=self.sync)
        forward_begins(self.module, self.reducer.intake.limits)
        self.reducer.events.emit_now(ForwardBegan)

    def _exchange(self) -> None:
        self.rebuild()
        if self.state.buffers is Buffers.EVERY_FORWARD and self.sync_buffers_next:
            self.state.sync_buffers()

    def rebuild(self) -> None:
        """Rebuild buckets once the first step has shown the order of gradients; first recover from a step that failed."""
        self.recovery.recover_if_failed()
        if self.reducer.machine.state is State.RESTING:
            self.reducer.intake.abandon()  # of a backward that is not reduced
        if torch.is_grad_enabled():
            if (hooks := self.reducer.intake.hooks) is not None and hooks.converted():
                self._follow_conversion()
            self.reducer.rebuild()

    @property
    def recomputing(self) -> bool:
        """Whether a forward now is not a new step: a checkpoint around the model computes it again during its own backward."""
        return torch._C._current_graph_task_id() != -1 and self.reducer.backward_runs

    def forward_failed(self, error: BaseException) -> None:
        """The module's forward has raised: if a backward was expected, the other ranks must not wait for it."""
        if torch.is_grad_enabled() and not self.recomputing:
            self.reducer.iterations.fail_forward(error)

    @untraced_call
    def after_forward(self, output: Any) -> Any:
        """Expect the backward of this forward. Returns the output, which may pass through a sink."""
        if self.recomputing:
            return output
        self.reducer.events.record(RecordKind.FORWARD_ENDED, self.reducer.iterations.number, event=ForwardEnded)
        if torch.is_grad_enabled():
            self.reducer.iterations.forward_ended()
            mark_outputs(output, self.reducer.iterations)
        if not (torch.is_grad_enabled() and self.sync):
            self.sync_buffers_next = False
            on_backward(output, self.reducer.backward_begins)
            return output
        self.sync_buffers_next = True
        if self.graph is Graph.FIND_UNUSED:
            output = through_sink(output, clone=self.sink_clones)
        self.expect_backward(output)
        return output

    def expect_backward(self, output: Any) -> None:
        """The next backward, from `output`, is to be averaged."""
        self.reducer.substituted = self.state.holds_another(self.parameters[0])
        unused: list[int] = []
        if self.graph is Graph.FIND_UNUSED:
            with torch.autograd.profiler.record_function("search_unused_parameters"):
                reached = reachable_parameters(output, self.parameters)
            unused = [i for i in range(len(self.parameters)) if i not in reached]
            if unused != self._last_unused and not self.reducer.substituted:
                self._last_unused = unused
                try:
                    self._check_hooked()
                except LayoutError as error:
                    self.reducer.iterations.fail_forward(error)
                    raise
        self.reducer.prepare(unused, all_call=not on_backward(output, self.reducer.backward_begins))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without averaging them."""
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before

    # -- between steps ---------------------------------------------------------------------------------------------------

    def become_static(self) -> None:
        self.graph = Graph.STATIC
        self.reducer.used.track = False
        self.reducer.order.limits = self._policies.buckets.limits
        self.reducer.learn_static_graph()

    def check_finished(self) -> None:
        """Raise if the last backward did not reduce every bucket."""
        self.reducer.catch_up()
        if self.reducer.machine.in_backward:
            raise self.reducer.machine.unfinished()

    def move_to_group(self, group: Group) -> None:
        """Communicate over another group from the next step on, with the hook's state as it is."""
        self.group = self.state.group = group
        self.reducer.move_to_group(group)
        self.recovery.moved_to_group()
        self.runner.move_to_group(group)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle of a replicated module is an ordinary module: this object is replaced by None."""
        return type(None), ()

    def detach(self) -> None:
        """Remove our hooks: the module is an ordinary module again."""
        self.reducer.intake.detach()
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self.state.warn_when_saved(None)
        self.runner.close()


class _Sink(torch.autograd.Function):
    """An identity at the end of forward through which all outputs pass together, as in torch's DDP.

    When only some outputs are part of the loss, backward would never reach the parameters behind the others. This node makes the
    engine continue from each, with undefined gradients where there are none, so that every parameter's hook is called.
    """

    @staticmethod
    def forward(ctx: Any, clone: bool, *values: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(False)  # None stays None
        if clone:
            # A loss computed in place on an output would otherwise be refused as a write into a view.
            return tuple(v.clone() if isinstance(v, Tensor) else v for v in values)
        return values

    @staticmethod
    @untraced_call
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None, *grads)


def through_sink(output: Any, *, clone: bool) -> Any:
    """The same structure of outputs, with every tensor that has a history passed through the sink."""
    values, rebuild = _flatten(output)
    passed = _Sink.apply(clone, *values)
    kept = [v if isinstance(v, Tensor) and v.grad_fn is None else p for v, p in zip(values, passed, strict=True)]
    return rebuild(iter(kept))


def _flatten(output: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    """Flatten nested containers: (leaves, a function that rebuilds them from other leaves). Unlike pytree, handles dataclasses."""
    leaves, structure = tree_flatten(output)
    parts = [
        _flatten_fields(leaf) if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) else ([leaf], next)
        for leaf in leaves
    ]

    def rebuild(values: Iterator[Any]) -> Any:
        return tree_unflatten([rebuild_part(values) for _, rebuild_part in parts], structure)

    return [value for values, _ in parts for value in values], rebuild


def _flatten_fields(record: Any) -> tuple[list[Any], Callable[[Iterator[Any]], Any]]:
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if hasattr(record, f.name)}
    values, rebuild_part = _flatten(fields)

    def rebuild(values: Iterator[Any]) -> Any:
        # Not by its constructor, which may take other arguments than its fields, or have side effects.
        copied = copy.copy(record)
        for name, value in rebuild_part(values).items():
            object.__setattr__(copied, name, value)
        return copied

    return values, rebuild

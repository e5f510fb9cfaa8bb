"""gradwire's hooks inside torch's own DDP: `ddp.register_comm_hook(None, as_torch_hook(hook))`.

Note [A group of its own]
torch's DDP communicates too: with `find_unused_parameters` it all-reduces the map of used parameters once all buckets have been
launched, while a hook with several collectives may still be running, and the order of the two would differ from rank to rank. So
the hook communicates over a duplicate of DDP's process group.
Making it is a collective on the original group, so all ranks do that at the same point: the first bucket that DDP launches, or an
earlier call that every rank makes.

Where collectives are ordered by CUDA streams (NCCL) the whole reduction is enqueued from backward's thread, so the original group
can be used. The same holds for groups that cannot be duplicated: their reductions complete before backward continues.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.autograd.backward_end import at_backward_end
from gradwire.errors import HookError, UsageError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.groups.c10d import C10dGroup
from gradwire.hooks.base import CommHook
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.periodic.base import OuterHook, check_outer
from gradwire.policies import NonFinite, check_policies
from gradwire.recorder import writer
from gradwire.recorder.format import RecordKind
from gradwire.reducer.buckets.layout import ParameterSpec, plain_name
from gradwire.reducer.checks.attached_optimizers import AttachedOptimizers
from gradwire.reducer.checks.nonfinite import NonFiniteChecked
from gradwire.reducer.checks.nonfinite_report import StepRejected, StepSkipped
from gradwire.reducer.hook.driver import Finished, Pending
from gradwire.reducer.hook.outer_optimizer import cut
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.model_events import ModelEvents


def as_torch_hook(
    hook: CommHook,
    group: Group | None = None,
    *,
    named_parameters: Iterable[tuple[str, Tensor]] = (),
    nonfinite: NonFinite = NonFinite.PASS,
) -> TorchDdpHook:
    """A torch-style hook that reduces every bucket with `hook` over the ranks of `group`.

    It communicates over a duplicate of `group`, made by the first bucket, because torch uses DDP's process group at the same time.
    The default is the process group that DDP passes as the hook's state, `ddp.register_comm_hook(pg, function)`, or else WORLD; so
    the function may be made before `dist.init_process_group`.

    torch does not pass parameter names to its hooks; pass `model.named_parameters()` to have them in errors and in saved state.
    The hook's states live as long as the function; when torch rebuilds its buckets they follow their parameters. The function
    has `hook_state_dict()`, `load_hook_state_dict(d)`, and `close()`, which closes its group; and for hooks such as `diloco`,
    which need the names, and parameters that are equal on all ranks, `attach_optimizer(optimizer)`, `outer_step()` and
    `average_parameters()`. With `nonfinite`, backward checks gradients and averages for NaN and infinity, which needs the names.
    """
    check_outer(hook, "as_torch_hook")
    if group is not None and not isinstance(group, Group):
        raise UsageTypeError(
            f"as_torch_hook({hook!r}, {group!r}): not a gradwire Group. Pass gw.from_process_group(pg), or no group for WORLD's."
        )
    named = [(plain_name(name), parameter) for name, parameter in named_parameters]
    checks = StepChecks(named, nonfinite, doing=f"as_torch_hook({hook!r}, nonfinite=...)")
    return TorchDdpHook(hook, group, named, checks)


class TorchDdpHook:
    """A torch-style hook, with the hook methods of a gradwire model."""

    def __init__(
        self, hook: CommHook, group: Group | None, named: list[tuple[str, Tensor]], checks: StepChecks
    ) -> None:
        self.__name__ = self.__qualname__ = repr(hook)  # what torch logs
        self._hook = hook
        self._checks = checks
        self._original = group
        self._pg: Any = None
        """The process group of the original group, if none was given."""
        self._made: list[Group] = []
        """Groups that were not given: the original one, and its duplicate. See Note [A group of its own]."""
        self._overlaps = True
        """Whether a reduction may overlap with torch's own work: if nothing else uses the group."""
        self._names = {id(p): name for name, p in named}
        self._device = named[0][1].device if named else torch.device("cpu")
        # Parameters are kept only for a hook that writes them: this adapter lives as long as torch's reducer.
        self._named = [(n, p) for n, p in named if p.requires_grad] if isinstance(hook, OuterHook) else []
        self._runner: HookRunner | None = None
        self._events: ModelEvents | None = None
        self._optimizers = AttachedOptimizers()
        if isinstance(hook, OuterHook) and not self._named:
            raise UsageError(
                f"as_torch_hook({hook!r}): this hook writes parameters, but none were given. "
                "Pass named_parameters=model.named_parameters()."
            )
        # Parameters that the hook cannot reduce are refused before any step; torch does not expose which have sparse gradients.
        for _, spec, _ in cut([(name, p) for name, p in named if p.requires_grad], 1):
            hook.check(spec)
        if group is not None:
            self._begin()

    def _begin(self, state: Any = None) -> HookRunner:
        """The runner, over the original group; a hook that writes parameters records them. Does not communicate."""
        group = self._original_group(state)
        if self._runner is None:
            self._runner = HookRunner(self._hook, group, self._named, optimizers=self._optimizers)
        return self._runner

    def _original_group(self, state: Any) -> Group:
        """The group to duplicate: the given one, else that of `state`, a process group as for torch's own hooks, else WORLD's."""
        doing = f"as_torch_hook({self._hook!r})"
        if self._original is None:
            if not dist.is_initialized():
                raise UsageError(
                    f"{doing}: no group was given, and torch.distributed has none yet. Call dist.init_process_group "
                    "first, or pass group=."
                )
            self._pg = state if isinstance(state, dist.ProcessGroup) else dist.group.WORLD
            inside = getattr(self._pg, "group", None)  # set if it is a gradwire group behind torch's API
            if not isinstance(inside, Group):
                self._made.append(inside := C10dGroup(self._pg))
            self._original = inside
        elif self._pg is not None and isinstance(state, dist.ProcessGroup) and state is not self._pg:
            raise UsageError(
                f"{doing}: its first communication was over {self._pg.group_name!r}, but DDP now passes the process group "
                f"{state.group_name!r} as its state. Pass group=gw.from_process_group(pg) to as_torch_hook."
            )
        return self._original

    def _communicate(self, state: Any = None) -> HookRunner:
        """The runner, over this hook's own group. The first call is a collective."""
        runner = self._begin(state)
        if self._events is None:
            original = own = runner.group
            if original.size > 1 and not original.orders_streams(self._device):
                try:
                    self._made.append(own := original.split(0) or original)
                    runner.move_to_group(own)
                except UsageError:  # the same on every rank: it depends only on the kind of group
                    self._overlaps = False
            self._events = ModelEvents(own)
        return runner

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket."""
        spec, buffer = self._spec(bucket), bucket.buffer()
        self._device = device = spec.device
        runner = self._communicate(state)
        if spec.index == 0:  # torch launches its buckets in index order
            runner.states.next_step()
        ours = GradBucket(spec, buffer, bucket.parameters(), is_last=False)  # which gradwire hooks do not see
        events, step = self._events or ModelEvents(runner.group), runner.step
        events.record(RecordKind.BUCKET_FULL, step, spec=spec)
        with torch.no_grad(), writer.within(events.place(step, spec.index)):
            pending = self._checks.start(runner, ours, overlap=self._overlaps)
        events.record(RecordKind.BUCKET_LAUNCHED, step, spec=spec, label=runner.name)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if device.type == "cuda" or not self._overlaps:
            future.set_result(pending.wait())
            events.record(RecordKind.BUCKET_REDUCED, step, spec=spec)
            return future

        def fulfill(kept: HookRunner = runner) -> None:  # kept until its reduction is done, even if the model is freed
            try:
                with torch.no_grad():
                    value = pending.wait()
            except BaseException as error:  # any exception: torch waits for this future without a timeout
                future.set_exception(_as_exception(error, self._hook, spec))  # type: ignore[arg-type]  # torch's stub is wrong
            else:
                events.record(RecordKind.BUCKET_REDUCED, step, spec=spec)
                future.set_result(value)

        # torch waits for the future in C++ with no way to call back here, so one of our threads waits for the reduction.
        threading.Thread(target=fulfill, name=f"gradwire-hook-{spec.index}", daemon=True).start()
        return future

    __call__.__annotations__.clear()  # torch rejects a hook whose annotations are strings, as they are in this module

    def __deepcopy__(self, memo: object) -> TorchDdpHook:
        return self  # like a function: copies of DDP, as torch's AveragedModel makes them, hold the same hook

    def hook_state_dict(self) -> dict[str, Any]:
        """The hook's state on this rank, by parameter name: see `Replica.hook_state_dict`."""
        return self._begin().state_dict()

    def load_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state. Every rank calls it, between steps: see `Replica.load_hook_state_dict`."""
        self._communicate().load_state_dict(saved, device=self._device)

    def attach_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Run the outer steps of hooks such as `diloco` after this optimizer's steps: see `Replica.attach_optimizer`."""
        if isinstance(self._hook, OuterHook):
            self._optimizers.attach(optimizers, [p for _, p in self._named], self.outer_step)

    def outer_step(self) -> None:
        """Call this after each optimizer step if no optimizer is attached."""
        if isinstance(self._hook, OuterHook) and (outer := self._communicate().outer) is not None:
            outer.step_or_abort()

    def average_parameters(self) -> None:
        """Average the parameters over all ranks, after a hook that lets them differ."""
        if isinstance(self._hook, OuterHook):
            self._communicate().average_parameters()

    def close(self) -> None:
        """Close the hook's group now. Otherwise it is closed with DDP, which torch never frees if a hook has raised."""
        self._optimizers.detach()
        if self._runner is not None:
            self._runner.close()
        for group in reversed(self._made):
            group.close()

    def _spec(self, bucket: Any) -> BucketSpec:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        # A parameter without a name is named by the position at which it first appeared, which is the same on every rank.
        names = [self._names.setdefault(id(p), f"parameter {len(self._names)}") for p in parameters]
        return BucketSpec.of(bucket.index(), list(zip(names, parameters, strict=True)), buffer)


def _as_exception(error: BaseException, hook: CommHook, spec: BucketSpec) -> Exception:
    """`error` as an Exception, the only type that torch's futures accept."""
    if isinstance(error, Exception):
        return error
    text = f"communication hook {hook!r} on {spec}: ended by {type(error).__name__}: {error}. Find out what raised it."
    ended = HookError(text, hook=repr(hook))
    ended.__cause__ = error
    return ended


class StepChecks:
    """Checks of gradients in torch's own DDP, after it has written its averages and before backward returns. An exception at the
    end of backward would leave torch's reducer unfinished; so the check queues itself once more, behind it."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], policy: NonFinite, *, doing: str) -> None:
        check_policies(nonfinite=(policy, NonFinite))
        self._specs = [ParameterSpec.of(name, p) for name, p in named if p.requires_grad]
        self._policy = policy
        self._checked: NonFiniteChecked | None = None
        self._parameters: list[Tensor] = []
        self._steps = -1
        if policy is not NonFinite.PASS and not self._specs:
            raise UsageError(f"{doing}: errors name parameters. Pass named_parameters=model.named_parameters().")

    def start(self, runner: HookRunner, bucket: GradBucket, *, overlap: bool) -> Pending:
        """Start the reduction of a bucket, or run it to its end where it must not overlap with torch's."""
        if self._policy is NonFinite.PASS:
            return runner.start(bucket) if overlap else Finished(runner.run(bucket))
        if self._checked is None:
            self._checked = NonFiniteChecked(runner, self._specs, self._policy, overwritten=True, in_torchs_ddp=True)
        if bucket.index() == 0:
            self._steps += 1
            self._checked.drop_step()  # of a backward that has failed
            self._parameters = []
            at_backward_end(lambda: at_backward_end(self._averaged))
        self._parameters += bucket.parameters()
        return self._checked.start(bucket) if overlap else Finished(self._checked.run(bucket))

    def _averaged(self) -> None:
        assert self._checked is not None
        parameters, self._parameters = self._parameters, []
        error = self._checked.verify(self._steps)
        self._checked.drop_step()
        if isinstance(error, StepSkipped):
            for parameter in parameters:
                parameter.grad = None
        elif error is not None:
            raise error.error if isinstance(error, StepRejected) else error

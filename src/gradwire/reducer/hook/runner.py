"""HookRunner: one communication hook on the buckets of one model. It owns everything that the hook has there.

The reducer holds one, and so do the adapters for torch's DDP (`interop/ddp_hook.py`) and for FSDP (`interop/fsdp.py`). It knows
groups and hooks; it must not know modules, autograd, or when a bucket is full.

What a hook keeps is in one object, `HookStates`, with the count of steps, and is replaced whole. A reduction gets its state and its
`Turn` when it starts and shares nothing else with the runner, so several reductions may be in flight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import GradwireError, HookError
from gradwire.groups.base import Group
from gradwire.groups.completion import name_of
from gradwire.hooks.base import CommHook, Turn
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.dense import mean
from gradwire.hooks.periodic.base import OuterHook, check_outer
from gradwire.hooks.pump import Method, begin, describe
from gradwire.policies import ScaleCheck
from gradwire.reducer.checks.attached_optimizers import AttachedOptimizers
from gradwire.reducer.hook.driver import Driver, Pending, Submit, run
from gradwire.reducer.hook.hook_states import HookStates, from_dict, to_dict, with_ranks
from gradwire.reducer.hook.outer_optimizer import OuterOptimizer
from gradwire.reducer.hook.torch_hooks import TorchHook, TorchHookRun
from gradwire.reducer.rank_agreement import load_together

_NO_STATE = mean()


class HookRunner:
    """Runs one hook, ours or a torch-style one. `named_parameters` are needed by hooks that move parameters."""

    def __init__(
        self,
        hook: CommHook,
        group: Group,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
        *,
        optimizers: AttachedOptimizers | None = None,
    ) -> None:
        self.hook = hook
        self.torch_hook: tuple[TorchHook, Any] | None = None
        """A torch-style hook, with its state, in place of `hook`."""
        self.group = group
        self.weight = 1.0
        self.divisor: int | None = None
        self.uneven = False
        """Whether some ranks may have run out of inputs, and so make no steps of their optimizers, as under `join()`."""
        self.scale_check: ScaleCheck | None = None
        self._scale_checks: list[ScaleChecked] = []
        """Of the reductions of this step."""
        self.states: HookStates
        self.outer: OuterOptimizer | None = None
        self.optimizers = optimizers or AttachedOptimizers()
        self.driver = Driver(group)
        self.named_parameters = list(named_parameters)
        self.name = repr(hook)
        """The hook in error messages and records."""
        self.start_over()

    def start(self, bucket: GradBucket) -> Pending:
        """Start the reduction of a bucket; never waits for another rank, except on groups that block in `submit`."""
        state, step = self._begin(bucket)
        policy = self.scale_check
        if policy is None or step % policy.every or self.outer is not None:
            return self._start(bucket, state, step)
        projection = project(bucket.buffer())  # which a reduction may overwrite
        truth = torch.cat([projection, projection.new_ones(1)]) * self.weight
        check = ScaleChecked(self, bucket.spec, truth, policy, self._start(bucket, state, step))
        self._scale_checks.append(check)
        return check

    def _start(self, bucket: GradBucket, state: Any, step: int) -> Pending:
        if self.torch_hook is not None:
            return TorchHookRun(*self.torch_hook, bucket, self.group, step=step)
        return self.driver.launch(self.hook, bucket.buffer(), state, self._turn(bucket, step))

    def run(self, bucket: GradBucket, submit: Submit | None = None) -> Tensor:
        """The average of a bucket, by operations that `submit` submits, by default the group's."""
        return self._run(self.hook.reduce, bucket, bucket.buffer(), submit)

    def run_scattered(self, bucket: GradBucket, submit: Submit | None = None) -> Tensor:
        """This rank's row of the average of a bucket of equal rows; from the whole if the hook has no `reduce_scatter`."""
        if not self.hook.scatters:
            return self.run(bucket, submit).tensor_split(self.group.size)[self.group.rank]
        return self._run(self.hook.reduce_scatter, bucket, bucket.buffer().chunk(self.group.size)[0], submit)

    def _run(self, reduce: Method, bucket: GradBucket, like: Tensor, submit: Submit | None) -> Tensor:
        state, step = self._begin(bucket)
        reduction = begin(self.hook, reduce, bucket.buffer(), state, self._turn(bucket, step), like=like)
        return run(reduction, self.group, submit)

    def _begin(self, bucket: GradBucket) -> tuple[Any, int]:
        """The state and the step of a bucket. What an earlier hook has not sent is added to its gradient, if it is not refused."""
        outer = self.outer
        # The states of a hook with an outer half belong to that half.
        state = None if outer is not None or self.torch_hook is not None else self._state(bucket.spec)
        step = self.states.begin(bucket.spec, bucket.buffer())
        if outer is None:
            return state, step
        if bucket.index() == 0:
            outer.backward_begins()
        return None, outer.step

    def _state(self, spec: BucketSpec) -> Any:
        try:
            return self.states.of(spec)
        except Exception as error:
            if not isinstance(error, GradwireError):  # the user's own, from init() or load()
                error.add_note(f"raised by {describe(self.name, spec, self.group.rank, self.step)}")
            raise

    def _turn(self, bucket: GradBucket, step: int) -> Turn:
        group = self.group
        turn = Turn(bucket.spec, group.rank, group.size, step, donated=True, divisor=self.divisor, weight=self.weight)
        return turn if group.layout is None else dataclasses.replace(turn, hosts=group.layout)

    def verify(self, step: int) -> Exception | None:
        return next((error for check in self._scale_checks if (error := check.verify()) is not None), None)

    def drop_step(self) -> None:
        self._scale_checks.clear()

    def buckets_changed(self) -> None:
        """Parameters are in other buckets from now on: states follow their parameters."""
        self.driver.captured.drop()
        self.states.next_step()
        if self.outer is None:
            self.states.store_by_parameter()

    @property
    def step(self) -> int:
        """How many times the buckets have been reduced, or for a hook that moves parameters, the optimizer has stepped."""
        return self.states.steps if self.outer is None else self.outer.step

    @property
    def differ(self) -> bool:
        """Whether the hook lets the ranks' parameters differ now."""
        return self.outer is not None and self.outer.differ

    def average_parameters(self) -> None:
        """Make the parameters of all ranks equal, if the hook lets them differ. Every rank calls it."""
        if self.outer is not None:
            self.outer.average()

    def replace(self, hook: CommHook | tuple[TorchHook, Any]) -> None:
        """Use another hook; a torch-style one is given with its state. See Note [Another hook] in `hook_states.py`."""
        own = hook if isinstance(hook, CommHook) else _NO_STATE
        check_outer(own, "register_comm_hook")
        same = self.outer is not None and own.structure == self.outer.hook.structure
        saved = self.outer.state_dict() if self.outer is not None and same else None
        states = self.states.transfer_to(own, step=self.step)
        self.driver.captured.drop()
        self.hook, self.torch_hook = (hook, None) if isinstance(hook, CommHook) else (self.hook, hook)
        self.name = repr(hook) if isinstance(hook, CommHook) else name_of(hook[0])
        self.states, self.outer = states, self._outer_optimizer(states, saved)

    def start_over(self, step: int = 0) -> None:
        """Begin without states; parameters are the same on every rank."""
        self.states = HookStates(self.hook, step=step)
        self.outer = self._outer_optimizer(self.states)

    def _outer_optimizer(self, states: HookStates, saved: Mapping[str, Any] | None = None) -> OuterOptimizer | None:
        if self.torch_hook is not None or not isinstance(self.hook, OuterHook):
            return None
        named = self.named_parameters
        return OuterOptimizer(self.hook, self.group, named, states=states, saved=saved, optimizers=self.optimizers)

    def state_dict(self, **more: Any) -> dict[str, Any]:
        if self.outer is not None:
            return self.outer.state_dict()
        return to_dict(self.states, rank=self.group.rank, step=self.step, **more)

    def load_state_dict(
        self, saved: Mapping[str, Any], *, device: torch.device, specs: Sequence[BucketSpec] | None = None
    ) -> None:
        """Restore a saved state. Every rank calls it; if one cannot load, or is at another step, none does. `specs` are the buckets
        to come, where they are known."""

        def build(states: HookStates) -> tuple[HookStates, OuterOptimizer | None]:
            if not isinstance(self.hook, OuterHook):
                states.rehearse(self.states.specs if specs is None else specs)
            return states, self._outer_optimizer(states, saved)

        self.states, self.outer = load_together(saved, self.hook, self.group, device=device, build=build)

    def restore(self, saved: Mapping[str, Any], *, rank: int | None = None) -> None:
        """As `load_state_dict`, on this rank alone, or as another `rank`: for a copy of a model."""
        self.states = from_dict(saved, self.states.hook, rank=self.group.rank if rank is None else rank)
        self.outer = self._outer_optimizer(self.states, saved)

    def change_ranks(self, old_size: int, new_size: int, *, leavers: Iterable[Mapping[str, Any]] = ()) -> None:
        """Between steps: there are more or fewer ranks. This one takes on what `leavers` owe, whose `state_dict()`s these are.

        Every rank that stays calls it, and each leaver's state is given to one of them. See Note [Other ranks] in
        `hook_states.py`. A rank that joins loads the state of a member instead.
        """
        self.driver.captured.drop()
        self.restore(with_ranks(self.state_dict(), self.states.hook, old_size, new_size, leavers=leavers))

    def attach_optimizer(self, optimizers: Sequence[torch.optim.Optimizer], stepped: Callable[[], object]) -> None:
        """Call `stepped`, which calls `outer.optimizer_stepped`, after the steps of these optimizers alone."""
        self.optimizers.attach(optimizers, [p for _, p in self.named_parameters], stepped)

    def move_to_group(self, group: Group) -> None:
        """Communicate over another group from the next reduction on."""
        self.driver.close()
        self.group, self.driver = group, Driver(group)
        if self.outer is not None:
            self.outer.group = group

    def close(self) -> None:
        self.driver.close()
        self.optimizers.detach()


@dataclass(slots=True)
class ScaleChecked:
    """A reduction whose result is compared with the true mean's projection, once all reductions of the step are over."""

    runner: HookRunner
    spec: BucketSpec
    truth: Tensor
    """What this rank adds to the projection, the norm, and the weight of all gradients."""
    policy: ScaleCheck
    pending: Pending
    result: Tensor = field(init=False)

    def wait(self) -> Tensor:
        self.result = self.pending.wait()
        return self.result

    def verify(self) -> HookError | None:
        """An error if the result is off by a factor."""
        group, truth = self.runner.group, self.truth.to(self.result.device)
        label = f"scale check of bucket {self.spec.index}"
        group.submit(all_reduce(truth, op=ReduceOp.SUM, label=label)).wait()
        total, norms, weights = truth.tolist()
        if not weights:
            return None
        expected, norm = total / weights, norms / weights
        if not math.isfinite(expected):
            return None  # that of a gradient, which is not the hook's fault: see `policies.NonFinite`
        got = float(project(self.result)[0])
        # Where the projection nearly cancels, rounding, whose size goes with the norm, makes its relative error meaningless.
        if abs(expected) < 0.1 * norm or abs(got - expected) <= self.policy.tolerance * abs(expected):
            return None
        is_sum = math.isclose(got, expected * group.size, rel_tol=0.05)
        guess = " It looks like a sum: divide by the number of ranks." if is_sum else ""
        return HookError(
            f"scale check of hook {self.runner.name} on {self.spec}, rank {group.rank}: the result is "
            f"{got / expected:.3g} times the mean over {group.size} ranks.{guess}",
            hook=self.runner.name,
        )


def project(buffer: Tensor) -> Tensor:
    """The inner product with a fixed vector of signs, linear in the buffer and cheap; and the buffer's norm."""
    values = (buffer.coalesce().to_dense() if buffer.is_sparse else buffer).detach().reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.dtype.is_complex else values
    values = values.to(torch.float64)
    signs = torch.ones_like(values)
    signs[1::3] = -1
    return torch.stack([(values * signs).sum(), values.norm()])

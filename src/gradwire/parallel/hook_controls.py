"""HookControls: the methods of DistributedDataParallel and Replica that control the hook between steps."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from gradwire.errors import HookError
from gradwire.hooks.base import CommHook, Trait
from gradwire.hooks.periodic.base import check_outer
from gradwire.parallel.agreement import SKIP, refuse_join
from gradwire.reducer.buckets.layout import plain_name
from gradwire.reducer.rank_agreement import odd_ones_out
from gradwire.runtime.threads import weakly


class HookControls:
    """Methods that control the communication hook of `replica`."""

    replica: Any
    """A Replica, which has these methods itself."""

    def set_hook(self, hook: CommHook) -> None:
        """Use another hook from the next step on. Every rank must call it, between the same steps, with an equal hook.

        What the previous hook has not sent yet is not lost: see Note [Another hook] in `reducer/hook/hook_states.py`. After a
        hook that does not average gradients in every step, the parameters are averaged first.
        """
        check_outer(hook, "set_hook")
        replica = self._between_steps(f"set_hook({hook!r})")
        reducer = replica.reducer
        for spec in reducer.layout.buckets:
            hook.check(spec)
        rank, step = reducer.group.rank, reducer.steps
        odd = odd_ones_out(reducer.group, f"{hook!r} at step {step}", device=reducer.device, label="set_hook")
        if odd:
            raise HookError(
                f"set_hook({hook!r}) at step {step} on rank {rank}: ranks {odd} set a different hook or "
                "are at a different step. Nothing was changed; call it with equal hooks after the same step on every rank."
            )
        replica.runner.average_parameters()
        replica.use_hook(hook)

    def hook_state_dict(self) -> dict[str, Any]:
        """The hook's state on this rank, by parameter name, for `torch.save`: each rank saves its own.

        `load_hook_state_dict` accepts it with any world size: see Note [Whose state it is] in `reducer/hook/hook_states.py`.
        """
        self._check_own_hook("hook_state_dict")
        reducer = self.replica.reducer
        state: dict[str, Any] = self.replica.runner.state_dict(order=reducer.order.names(reducer.layout))
        return state

    def load_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `hook_state_dict` returned. Every rank calls it, between steps, with a hook of the same structure.

        Settings, such as a ratio, may differ. Before the first step the buckets become those of the saved run.

        A rank loads its own state in full; of another rank's, only what all ranks share, so a new rank loads that of rank 0.
        """
        self._check_own_hook("load_hook_state_dict")
        replica = self._between_steps("load_hook_state_dict()")
        reducer = replica.reducer
        replica.runner.load_state_dict(saved, device=reducer.device, specs=reducer.layout.buckets)
        if not reducer.used.learning:
            reducer.order.expect([plain_name(name) for name in saved.get("order", ())])

    def _between_steps(self, doing: str) -> Any:
        """The replica, after recovery from a failed step; raises during backward."""
        self._check_between_steps(doing)
        self.replica.agreement.recover()
        self.finish_checks()
        return self.replica

    def _check_between_steps(self, doing: str) -> None:
        if self.replica.reducer.machine.in_backward:
            raise HookError(f"{doing} during backward. Call it between steps.")

    def _check_own_hook(self, doing: str) -> None:
        self._check_between_steps(f"{doing}()")
        runner = self.replica.runner
        if runner.torch_hook is not None:
            raise HookError(
                f"{doing}(): the model has the torch-style hook {runner.name}, which keeps its own state. Save the state object "
                "that you registered it with.",
                hook=runner.name,
            )

    def set_weight(self, weight: float) -> None:
        """Set the weight of this rank's gradient under `hooks.weighted_mean()`: usually the number of samples in its batch."""
        runner = self.replica.runner
        if runner.torch_hook is not None or Trait.WEIGHS not in runner.hook.traits:
            warnings.warn(
                f"set_weight({weight!r}) has no effect with the hook {runner.name}: all ranks count equally. Set the hook first: "
                "model.set_hook(gw.hooks.weighted_mean()).",
                UserWarning,
                stacklevel=2,
            )
        runner.weight = float(weight)

    def finish_checks(self) -> None:
        """Wait for the check of the last step, if the next backward would have read its result, and apply the policy.

        Every rank calls it, after the last step or before it saves a checkpoint. A no-op unless `nonfinite` checks on CUDA are read
        late: see `attach_optimizer`.
        """
        if self.replica.checks is not None:
            self.replica.checks.finish()

    @property
    def reads_late(self) -> bool:
        """Whether the check of the last step was left to the device, so that the next backward, or `finish_checks`, reports it."""
        return self.replica.checks is not None and bool(self.replica.checks.late)

    @property
    def skipped_steps(self) -> int:
        """How many steps `NonFinite.SKIP` has skipped so far; where results are read late, without the last step."""
        return 0 if self.replica.checks is None else int(self.replica.checks.skipped)

    def step_failed(self, error: BaseException) -> None:
        """Fail the step on all ranks because of an exception between forward and backward, which gradwire cannot see.

        Call it where that exception is caught; a no-op if the step has already failed or ended.
        """
        iterations = self.replica.reducer.iterations
        if iterations.expects_backward:
            iterations.fail(error)

    def agree_to_skip(self, flag: bool) -> bool:
        """Whether any rank skips the batch of this step: if one passes True, all ranks get True, and skip theirs.

        Every rank calls it once for each averaged step, always before the forward whose backward is averaged, or always after it.
        From the first call on, a step without it raises, and fails on all ranks. Ranks that never call are named when the group's
        timeout has passed. After True, zero the gradients: those that were accumulated belong to the skipped step.
        """
        refuse_join(self, SKIP, self.replica.group.rank)
        return bool(self.replica.agreement.agree_to_skip(flag))

    def attach_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Run the outer steps of hooks such as `diloco` after each step of this optimizer (of several: when all have stepped).

        Without an optimizer, call `outer_step()` after every step yourself.
        A second call replaces the first: steps of previously attached optimizers no longer count.

        With `nonfinite` checks on CUDA: if the optimizers are fused and train all parameters, they skip a bad step on the device.
        Then the host does not wait for the result, and the next backward reports it. Otherwise a no-op.
        """
        self.replica.runner.attach_optimizer(optimizers, weakly(self.outer_step))

    def outer_step(self) -> None:
        """Call after an optimizer step: communicates if the hook has an outer step and it is due. Every rank calls it."""
        replica = self.replica
        if replica.runner.outer is None:
            return
        try:
            replica.runner.outer.optimizer_stepped()
        except BaseException as error:
            replica.reducer.iterations.fail(error)
            raise

    def average_parameters(self) -> None:
        """Average the parameters over all ranks: at the end of training with a hook that lets them differ."""
        replica = self.replica
        with replica.recovery.failing_forward():
            replica.recovery.recover_if_failed()
            replica.runner.average_parameters()

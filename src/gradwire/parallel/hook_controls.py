"""HookControls: the part of a Replica's API that controls its hook between steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gradwire.errors import HookError
from gradwire.events import Handle
from gradwire.hooks.base import CommHook
from gradwire.hooks.periodic.base import check_outer
from gradwire.parallel.module_state import ModuleState
from gradwire.parallel.recovery import Recovery
from gradwire.parallel.unequal import warn_when_saved
from gradwire.reducer import Reducer
from gradwire.reducer.buckets.layout import plain_name
from gradwire.reducer.checks.nonfinite import NonFiniteChecked
from gradwire.reducer.hook.hook_agreement import odd_ones_out
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.hook.torch_hooks import TorchHook
from gradwire.reducer.machine import State
from gradwire.runtime.threads import weakly


class HookControls:
    """The half of a Replica that concerns its communication hook."""

    runner: HookRunner
    reducer: Reducer
    recovery: Recovery
    state: ModuleState
    _saving: Handle | None = None
    _checked: NonFiniteChecked | None = None

    @property
    def hook(self) -> CommHook:
        """The gradwire hook, unless a torch-style hook has been registered."""
        return self.runner.hook

    @property
    def weight(self) -> float:
        """The weight of this rank's gradient under `hooks.weighted_mean()`."""
        return self.runner.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.runner.weight = weight

    def set_hook(self, hook: CommHook) -> None:
        """Use another hook from the next step on. Every rank must call it, between the same steps, with an equal hook.

        What the previous hook has not sent yet is not lost: see Note [Another hook] in `reducer/hook/hook_states.py`. After a
        hook that does not average gradients in every step, the parameters are averaged first.
        """
        check_outer(hook, "set_hook")
        self._check_between_steps(f"set_hook({hook!r})")
        with self.recovery.failing_forward():
            self.recovery.recover_if_failed()
        self.finish_checks()
        for spec in self.reducer.layout.buckets:
            hook.check(spec)
        rank, step = self.reducer.group.rank, self.reducer.steps
        odd = odd_ones_out(self.reducer.group, f"{hook!r} at step {step}", device=self.reducer.device, label="set_hook")
        if odd:
            raise HookError(
                f"set_hook({hook!r}) at step {step} on rank {rank}: ranks {odd} set a different hook or "
                "are at a different step. Nothing was changed; call it with equal hooks after the same step on every rank."
            )
        if self.runner.outer is not None:
            self.runner.outer.average()
        self.use_hook(hook)

    def use_hook(self, hook: CommHook | tuple[TorchHook, Any]) -> None:
        """Use this hook on this rank; a torch-style hook is given with its state."""
        self.runner.replace(hook)
        self._hook_changed()

    def _hook_changed(self) -> None:
        self.reducer.may_poll = self.runner.torch_hook is None  # torch's hooks see parameters, and may write to `.grad`
        if self._saving is not None:
            self._saving.remove()
            self._saving = None
        if self.runner.outer is not None and (module := self.state.module_or_none) is not None:
            self._saving = warn_when_saved(module, self.runner)

    def hook_state_dict(self) -> dict[str, Any]:
        """The hook's state on this rank, by parameter name, for `torch.save`: each rank saves its own.

        `load_hook_state_dict` accepts it with any world size: see Note [Whose state it is] in `reducer/hook/hook_states.py`.
        """
        self._check_own_hook("hook_state_dict")
        return self.runner.state_dict(order=self.reducer.order.names(self.reducer.layout))

    def load_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a state that `hook_state_dict` returned. Every rank calls it, between steps, with a hook of the same structure.

        Settings, such as a ratio, may differ. Before the first step the buckets become those of the saved run.

        A rank loads its own state in full; of another rank's, only what all ranks share, so a new rank loads that of rank 0.
        """
        self._check_own_hook("load_hook_state_dict")
        with self.recovery.failing_forward():
            self.recovery.recover_if_failed()
        self.finish_checks()
        self.runner.load_state_dict(saved, device=self.reducer.device, specs=self.reducer.layout.buckets)
        if not self.reducer.used.learning:
            self.reducer.order.expect([plain_name(name) for name in saved.get("order", ())])

    def settings(self) -> dict[str, Any]:
        """The hook, its state and the weight, for a copy or a pickle of the model."""
        torch_hook = self.runner.torch_hook
        state = None if torch_hook is not None else self.hook_state_dict()
        return {"hook": torch_hook or self.hook, "state": state, "weight": self.weight}

    def restore(self, settings: Mapping[str, Any]) -> None:
        """Apply `settings()` of the model this one was copied from. Local: one rank may make a copy without the others."""
        self.use_hook(settings["hook"])
        if settings["state"] is not None:
            self.runner.restore(settings["state"])
        self.weight = settings["weight"]

    def _check_between_steps(self, doing: str) -> None:
        if self.reducer.machine.state in (State.RUNNING, State.LAUNCHED):
            raise HookError(f"{doing} during backward. Call it between steps.")

    def _check_own_hook(self, doing: str) -> None:
        self._check_between_steps(f"{doing}()")
        if self.runner.torch_hook is not None:
            name = self.runner.name
            raise HookError(
                f"{doing}(): the model has the torch-style hook {name}, which keeps its own state. Save the state object that you "
                "registered it with.",
                hook=name,
            )

    # -- checks ----------------------------------------------------------------------------------------------------------

    def finish_checks(self) -> None:
        """Wait for the check of the last step, if the next backward would have read its result, and do what the policy says.

        Every rank calls it, after the last step or before it saves a checkpoint. A no-op unless `nonfinite` checks on CUDA are read
        late: see `attach_optimizer`.
        """
        if self._checked is not None:
            self._checked.finish()

    @property
    def reads_late(self) -> bool:
        """Whether the check of the last step was left to the device, so that the next backward, or `finish_checks`, reports it."""
        return self._checked is not None and self._checked.late

    @property
    def skipped_steps(self) -> int:
        """How many steps `NonFinite.SKIP` has skipped so far; where results are read late, without the last step."""
        return 0 if self._checked is None else self._checked.skipped

    # -- outer steps -----------------------------------------------------------------------------------------------------

    def attach_optimizer(self, *optimizers: torch.optim.Optimizer) -> None:
        """Run the outer steps of hooks such as `diloco` after each step of this optimizer (of several: when all have stepped).

        Without an optimizer, you promise to call `outer_step()` after every step yourself.
        A second call replaces the first: steps of previously attached optimizers no longer count.

        With `nonfinite` checks on CUDA: if the optimizers are fused and train all parameters, they skip a bad step on the device.
        Then the host does not wait for the result, and the next backward reports it. Otherwise a no-op.
        """
        self.runner.attach_optimizer(optimizers, weakly(self.outer_step))

    def outer_step(self) -> None:
        """Call after an optimizer step: communicates if the hook has an outer step and it is due. Every rank calls it."""
        if self.runner.outer is None:
            return
        try:
            self.runner.outer.optimizer_stepped()
        except BaseException as error:
            self.reducer.iterations.fail(error)
            raise

    def average_parameters(self) -> None:
        """Average the parameters over all ranks: at the end of training with a hook that lets them differ."""
        with self.recovery.failing_forward():
            self.recovery.recover_if_failed()
            if self.runner.outer is not None:
                self.runner.outer.average()

"""Manual finalization: the caller, not the end of backward, waits for the reductions (torch 2.15's DDP).

Whatever runs between the last gradient and `finalize_backward()` overlaps with the communication of the last buckets.
"""

from __future__ import annotations

from typing import Any

from gradwire.errors import NotFinalizable
from gradwire.parallel.replica import Replica
from gradwire.reducer.machine import State


class ManualFinalization:
    """The properties and methods of torch's class for manual finalization."""

    replica: Replica
    logger: Any
    mixed_precision: Any
    require_backward_grad_sync: bool
    _manual = False

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether every synchronized backward has to be followed by `finalize_backward()`. Set it between steps."""
        return self._manual

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        doing = f"require_manual_backward_finalization = {required}"
        if self.logger is None:
            if required:
                raise NotFinalizable(
                    f"{doing}: all parameters are in delay_all_reduce_named_params, which has no buckets."
                )
            return
        if self.replica.reducer.status.in_backward:
            raise NotFinalizable(f"{doing}: a backward is not finalized yet. Set it before a forward.")
        self._manual = bool(required)
        self.replica.reducer.manual = self._manual

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether `finalize_backward()` must not be called before the next backward has returned. To be read after forward.

        True while buckets or a static graph are still to be learned, and with mixed precision. Otherwise it may be called
        from a backward hook, once all gradients are ready.
        """
        if not self._manual:
            return False
        status = self.replica.reducer.status
        return self.mixed_precision is not None or status.rebuild_due or status.learning

    def finalize_backward(self) -> None:
        """Wait for the reductions of this step and put the averages into `.grad`: once for each synchronized backward."""
        doing = "finalize_backward()"
        if not self._manual:
            raise NotFinalizable(
                f"{doing}: backward finalizes automatically. Set require_manual_backward_finalization = True first."
            )
        if not self.require_backward_grad_sync:
            raise NotFinalizable(f"{doing} under no_sync(): nothing is reduced there. Call it after the step outside.")
        reducer = self.replica.reducer
        reducer.catch_up()
        machine = reducer.machine
        if machine.state is State.RUNNING:
            names = ", ".join(machine.names[i] for i in machine.missing())
            raise NotFinalizable(f"{doing}: not all buckets are ready; there is no gradient yet for {names}.")
        if machine.state is not State.LAUNCHED:
            raise NotFinalizable(
                f"{doing}: there is no reduction to finalize. Call it once after each synchronized backward."
            )
        reducer.finish()

    def _check_finalized(self) -> None:
        """Before a forward: the last backward must have been finalized. It still can be, so nothing is changed."""
        if self._manual and self.replica.reducer.status.state is State.LAUNCHED:
            raise NotFinalizable(
                "forward: the last backward is not finalized. Call finalize_backward() before the next forward."
            )

"""Recovery: after a step that failed on some rank, all ranks meet and continue from rank 0's model.

See [Iterations] in `reducer/iterations.py` for which rank raises in which iteration.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from gradwire.collectives import ReduceOp, all_reduce, broadcast
from gradwire.errors import GroupAborted
from gradwire.parallel.module_state import ModuleState
from gradwire.reducer import Reducer
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.iterations import failed_iteration


class Recovery:
    """Recovers one model on one rank."""

    def __init__(self, reducer: Reducer, runner: HookRunner, state: ModuleState) -> None:
        self._reducer = reducer
        self._runner = runner
        self._state = state
        self._recoveries = reducer.group.ledger.recoveries
        self._iterations_behind = 0
        self._loop_left = False
        self.agreed: list[float] = []
        """What `Balance` has agreed on with the other ranks, some of which may have left the agreement without the result."""

    @contextlib.contextmanager
    def failing_forward(self) -> Iterator[None]:
        """Around code whose failure is raised to this rank's caller, and so need not be raised again."""
        try:
            yield
        except BaseException as error:
            if self._reducer.group.failure is not None:
                self._reducer.iterations.fail_forward(error)
            raise

    def recover_if_failed(self) -> None:
        """Recover from a failed step, or raise its failure if it was not raised to this rank's caller yet. The step may have been
        another model's on this group: the first model used again recovers the group, and the others start over when they are."""
        group, iterations = self._reducer.group, self._reducer.iterations
        failure, ledger = group.failure, group.ledger
        if iterations.survive is not None:
            return  # the members that are left go on in another group
        if failure is None:
            if self._recoveries != ledger.recoveries:
                self._start_over(iterations.begins)
                self._iterations_behind = 0  # the model that has recovered the group has made up for them
            self._raise_behind()
            return
        iteration = failed_iteration(failure)
        if ledger.reported is not failure:
            if iteration is None or iterations.begins <= iteration:
                raise failure
            iterations.last_error = str(failure)
            warnings.warn(
                f"rank {group.rank} had finished step {iteration} when it failed on another rank, so it continues, with "
                f"parameters taken from rank 0 ({failure}).",
                stacklevel=2,
            )
        self.recover()
        self._raise_behind()

    def recover(self) -> None:
        """After a step that failed on some rank: meet the others, and make the replicas equal again.

        Some ranks may have stepped their optimizer and some not, so parameters and buffers are taken from rank 0. Hooks
        start without states, at rank 0's step: some ranks' states include the failed step and some do not, and a hook may have
        been interrupted while writing one. Losing a residual loses what was not sent yet, about one gradient.
        """
        begins, group = self._reducer.iterations.begins, self._reducer.group
        self._runner.driver.drain(group.timeout)
        group.recover()
        group.ledger.recoveries += 1
        self._start_over(begins)

    def _start_over(self, begins: int) -> None:
        """The second half of `recover`, on a group that works again, in iteration number `begins`."""
        reducer, group, iterations = self._reducer, self._reducer.group, self._reducer.iterations
        self._recoveries = group.ledger.recoveries
        self._runner.driver.drain(group.timeout)
        iteration = torch.tensor([begins], device=reducer.device)
        iterations.number = begins
        group.submit(all_reduce(iteration, op=ReduceOp.MAX, label="recovery")).wait()
        latest = int(iteration.item())
        if self._loop_left:  # all ranks begin a new loop, wherever they were in the old one
            iterations.number, self._loop_left = latest, False
        self._iterations_behind = latest - iterations.number
        agreed = self.agreed or [0.0] * (1 + 2 * group.size)
        shared = torch.tensor([self._runner.step, *agreed], dtype=torch.float64, device=reducer.device)
        reducer.start_over()
        self._state.broadcast()
        group.submit(broadcast(shared, src=0, label="recovery")).wait()
        step, *self.agreed = shared.tolist()
        self._runner.start_over(int(step))

    def _raise_behind(self) -> None:
        """Raise if this rank must skip this iteration because others have lost it."""
        if self._iterations_behind:
            iterations = self._reducer.iterations
            self._iterations_behind -= 1
            iterations.number += 1
            raise GroupAborted(
                f"step {iterations.number - 1} of {self._reducer.group}: other ranks have lost this step, because they were in it "
                f"when an earlier one failed here ({iterations.last_error}). Nothing was averaged; the next step matches theirs.",
                reason="a step that other ranks have lost",
            )

    def loop_failed(self, error: BaseException) -> None:
        """A training loop that all ranks leave together has ended with `error` on this rank: end it on the others too."""
        iterations = self._reducer.iterations
        if not self._reducer.group.closed:
            (iterations.fail if iterations.expects_backward else iterations.fail_forward)(error)
            self._loop_left = True

    def moved_to_group(self) -> None:
        """The model continues with another group, whose earlier failures do not concern it."""
        self._recoveries = self._reducer.group.ledger.recoveries
        self.agreed = []

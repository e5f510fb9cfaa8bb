"""Checks of gradients in torch's own DDP: they run when it has written its averages, before backward returns."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.autograd.backward_end import at_backward_end
from gradwire.errors import UsageError
from gradwire.hooks.bucket import GradBucket
from gradwire.policies import NonFinite, check_policies
from gradwire.reducer.buckets.layout import ParameterSpec
from gradwire.reducer.checks.nonfinite import NonFiniteChecked, Overwritten
from gradwire.reducer.hook.driver import Finished, Pending
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.reductions import StepRejected, StepSkipped


class StepChecks:
    """The check of one hook inside torch's DDP.

    The end of backward is reported when its last bucket has been launched, before torch has put the averages back: torch queues
    that later. An exception at that point would leave torch's reducer unfinished for good. So the check queues itself once more,
    behind torch.
    """

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
            self._checked = NonFiniteChecked(runner, self._specs, self._policy, overwritten=Overwritten.ALL)
        if bucket.index() == 0:
            self._steps += 1
            self._checked.drop_step()  # of a backward that has failed
            self._parameters = []
            at_backward_end(self._launched)
        self._parameters += bucket.parameters()
        return self._checked.start(bucket) if overlap else Finished(self._checked.run(bucket))

    def _launched(self) -> None:
        at_backward_end(self._averaged)

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

"""Checks whether the gradients of a step, and their averages, are finite (see `policies.NonFinite`).

Note [What a healthy step costs]
The averages are looked at, by one sum over each bucket (see `collectives/finite.py`). If the hook passes NaN on to all ranks
(`CommHook.passes_nonfinite`: `mean` does), that is all: averages are the same bits on every rank, so either all ranks find them bad
and go on to exchange what they know, or none does. The gradients that they were made of are looked at afterwards, in `.grad`. If
they are views of the bucket, as when `zero_grad(set_to_none=False)` keeps them, they have been overwritten by then, so such a
bucket is looked at before its reduction too.

Any other hook may hide a NaN, or give each rank another result. Then ranks check gradients as well, and exchange 8 bytes in every
step, since a rank that decided alone would leave the others waiting.

Nothing waits for a CUDA device until all reductions have been enqueued; then the results of all checks are copied at once.
Where the device can act on the result alone, nothing waits at all: see Note [A result that comes late] in `nonfinite_late.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from gradwire.collectives.finite import is_finite
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.policies import NonFinite
from gradwire.reducer.buckets.buffers import ZeroBucket
from gradwire.reducer.buckets.layout import ParameterSpec
from gradwire.reducer.checks.nonfinite_late import Late, LateChecks
from gradwire.reducer.checks.nonfinite_reaction import Reaction
from gradwire.reducer.checks.nonfinite_report import Report, any_rank, exchange
from gradwire.reducer.checks.nonfinite_scan import Scan
from gradwire.reducer.checks.nonfinite_search import Found, Search
from gradwire.reducer.checks.nonfinite_waiting import WaitingCheck
from gradwire.reducer.hook.driver import Landed, Pending
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.reductions import StepRejected

_WORTH_ASKING = 4096
"""Elements that are summed in about the time of two calls from Python."""


class Overwritten(Enum):
    """Which gradients are overwritten in `.grad` before they are checked, so that they must be looked at when they are launched."""

    NONE = "none"
    """All stay there until they are checked."""
    IN_BUCKETS = "in buckets"
    """Those that are views of their bucket."""
    ALL = "all"
    """Averages are there before they are checked, as in torch's DDP."""


class NonFiniteChecked:
    """A runner that checks every bucket of a step, and decides with all ranks what happens if one finds a non-finite value."""

    def __init__(
        self, inner: HookRunner, specs: Sequence[ParameterSpec], policy: NonFinite, *, overwritten: Overwritten
    ) -> None:
        self._inner = inner
        self._specs = list(specs)
        self._reaction = Reaction(policy)
        self._overwritten = overwritten
        self._late = LateChecks(self._specs, policy)
        self._search = Search([spec.name for spec in specs])
        self._begun = False
        """Whether a bucket of this step was started."""
        self._step_check: WaitingCheck | Scan
        """A Scan if the result of this step is read late."""
        self._begin(torch.device("cpu"))

    @property
    def name(self) -> str:
        """The inner runner's."""
        return self._inner.name

    def buckets_changed(self) -> None:
        """As the inner runner."""
        self._inner.buckets_changed()

    def start(self, bucket: GradBucket) -> Pending:
        """Start the reduction of `bucket`, and check its result, and its input where that is needed."""
        self._look_before(bucket)
        self._reduced.append(bucket.spec)
        pending = self._inner.start(bucket)
        return _Looked(pending, self._step_check, bucket.spec, last=bucket.is_last())

    def run(self, bucket: GradBucket) -> Tensor:
        """As `start`, to the end, in this thread."""
        self._look_before(bucket)
        return _Looked(Landed(self._inner.run(bucket)), self._step_check, bucket.spec, last=False).wait()

    def _look_before(self, bucket: GradBucket) -> None:
        if not self._begun:  # the first bucket of a step
            self._begun = True
            self._begin(bucket.spec.device)
            scan = self._late.begin(self._inner) if self._can_be_late(bucket.spec) else None
            if scan is not None:
                self._step_check = scan
            self._reaction.prepare(self._inner.states)
        if isinstance(bucket, ZeroBucket):
            return
        if self._trusted and self._stay_in_grad(bucket):
            self._step_check.keep(bucket)
        else:
            self._step_check.look_at_gradients(bucket, self._narrow(bucket.spec.dtype))

    def _can_be_late(self, spec: BucketSpec) -> bool:
        """Not if a bad step has to be undone in the state of a hook, and not in torch's DDP, which has no `finish_checks`."""
        return self._trusted and self._overwritten is not Overwritten.ALL and self._inner.states.of(spec) is None

    def _stay_in_grad(self, bucket: GradBucket) -> bool:
        if bucket.spec.sparse or self._overwritten is Overwritten.ALL:
            return False
        return self._overwritten is Overwritten.NONE or _lie_elsewhere(bucket)

    def _begin(self, device: torch.device) -> None:
        inner = self._inner
        self._device = device
        self._trusted = inner.torch_hook is None and inner.outer is None and inner.hook.passes_nonfinite
        self._step_check = WaitingCheck(self._search, device)
        self._reduced: list[BucketSpec] = []

    def _narrow(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which gradients of `dtype` may overflow before they are reduced."""
        narrow = self._inner.hook.narrowest(dtype) if self._trusted else dtype
        return None if narrow == dtype else narrow

    def drop_step(self) -> None:
        """Forget the checks of a step that has ended or failed."""
        self._begun = False
        self._inner.drop_step()

    def verify(self, step: int) -> Exception | None:
        """Exchange what ranks have found, if there may be something, and apply the policy."""
        if not self._begun:
            return self._inner.verify(step)
        self._begun = False
        try:
            self._verify(step)
        except StepRejected as rejected:
            return rejected
        return self._inner.verify(step)

    def _verify(self, step: int) -> None:
        late, check, inner = self._late.take(self._inner), self._step_check, self._inner
        stepped = inner.optimizers.gradients_used
        try:
            inner.optimizers.clear_flag()
            if isinstance(check, Scan):
                self._late.enqueue(check, inner, self._narrow, step=step)
            if late is not None:
                self._read(late, stepped=stepped)
            report = self._report(check, step) if isinstance(check, WaitingCheck) else None
        except BaseException:
            self._late.take(inner)  # the step is dropped, whatever its own result
            inner.optimizers.clear_flag()
            raise
        finally:
            self._begin(self._device)  # nothing of the step is kept
        if report is not None:
            self._reaction.react(report, inner.group, [inner.states])
        inner.states.commit()

    @property
    def late(self) -> bool:
        """Whether the result of the last step has not been read."""
        return self._late.pending

    @property
    def skipped(self) -> int:
        """How many steps were skipped, as far as it is known."""
        return self._reaction.skipped

    def finish(self) -> None:
        """Wait for a result that would be read by the next step, and do what the policy says. Every rank calls it."""
        late = self._late.take(self._inner)
        if late is not None:
            try:
                self._read(late)
            except StepRejected as rejected:
                raise rejected.error from None

    def _bad_elsewhere(self) -> bool:
        """Whether averages of an earlier step, which no optimizer has used, are bad in parameters that this step leaves out."""
        reduced = {name for spec in self._reduced for name in spec.names}
        rest = [p.grad for name, p in self._inner.named_parameters if name not in reduced]
        return any(grad is not None and not is_finite(grad) for grad in rest)

    def _read(self, late: Late, *, stepped: bool = True) -> None:
        """Do what the policy says about an earlier step. Unless optimizers have `stepped` since, the present one may be bad too."""
        if late.scan.wait():
            drop = not stepped and self._bad_elsewhere()
            report = self._of_all(*late.scan.found(), step=late.step, hook=late.hook, later=True)
            self._reaction.react(report, self._inner.group, [self._inner.states], drop=drop)

    def _report(self, check: WaitingCheck, step: int) -> Report | None:
        gradients, averages = check.found()
        if self._trusted and not averages:
            return None  # on all ranks: see Note [What a healthy step costs]
        if not self._trusted and not any_rank(bool(gradients or averages), self._inner.group, self._device):
            return None
        gradients += check.found_in_kept(self._narrow)
        return self._of_all(gradients, averages, step=step, hook=self.name, trusted=self._trusted)

    def _of_all(
        self,
        gradients: list[Found],
        averages: list[Found],
        *,
        step: int,
        hook: str,
        trusted: bool = True,
        later: bool = False,
    ) -> Report:
        """What all ranks have found."""
        answers = exchange(self._inner.group, gradients, averages, device=self._device)
        names, shapes = [spec.name for spec in self._specs], [spec.shape for spec in self._specs]
        in_grads = self._overwritten is Overwritten.ALL
        return Report(answers, names, shapes, hook, averages_only=trusted, step=step, in_grads=in_grads, later=later)


class _Looked:
    """A reduction whose result is looked at. Before the `last` one of a step is waited for, the results of the others are."""

    def __init__(self, pending: Pending, check: WaitingCheck | Scan, spec: BucketSpec, *, last: bool) -> None:
        self._pending, self._check, self._spec, self._last = pending, check, spec, last

    def wait(self) -> Tensor:
        """The result."""
        if self._last:
            self._check.look_at_averages()
        result = self._pending.wait()
        self._check.add_average(self._spec, result)
        return result


def _lie_elsewhere(bucket: GradBucket) -> bool:
    """Whether no gradient lies in its bucket, so that none is overwritten before the end of the step.

    False for small parameters: to ask for each of them would take longer than to look at all.
    """
    parameters = bucket.parameters()
    if len(parameters) * _WORTH_ASKING > bucket.buffer().numel():
        return False
    rows = zip(parameters, bucket.gradients(), strict=True)
    return all(p.grad is None or p.grad.data_ptr() != view.data_ptr() for p, view in rows)

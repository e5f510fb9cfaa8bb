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

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
from torch import Tensor

from gradwire import flight_recorder
from gradwire.collectives.finite import is_finite
from gradwire.concurrency import weakly
from gradwire.errors import NonFiniteGradient
from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.policies import NonFinite
from gradwire.reducer.bucket_buffers import ZeroBucket
from gradwire.reducer.drive import Landed, Pending
from gradwire.reducer.hook_runner import HookRunner
from gradwire.reducer.hook_states import HookStates
from gradwire.reducer.layout import ParameterSpec
from gradwire.reducer.nonfinite_late import Late, LateChecks, on_stream_of_reductions
from gradwire.reducer.nonfinite_report import Report, any_rank, exchange
from gradwire.reducer.nonfinite_scan import Scan
from gradwire.reducer.nonfinite_search import Found, Look, Search
from gradwire.reducer.reductions import StepRejected, StepSkipped
from gradwire.user_warnings import warn_user

_WORTH_ASKING = 4096
"""Elements that are summed in about the time of two calls from Python."""


_MANY = (10, 100, 1000, 10000)
"""Numbers of steps skipped in a row at which a warning is shown again."""


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
        self._scan: Scan | None = None
        """What checks this step, if its result is read late."""
        self._check = weakly(self._verify)  # the runner, which this object holds, holds the check
        self._begin(torch.device("cpu"))

    @property
    def name(self) -> str:
        """The inner runner's."""
        return self._inner.name

    @property
    def checks(self) -> list[Callable[[int], None]]:
        """The inner runner's."""
        return self._inner.checks

    def buckets_changed(self) -> None:
        """As the inner runner."""
        self._inner.buckets_changed()

    def start(self, bucket: GradBucket) -> Pending:
        """Start the reduction of `bucket`, and check its result, and its input where that is needed."""
        self._look_before(bucket)
        self._reduced.append(bucket.spec)
        pending = self._inner.start(bucket)
        before = self._scan.look_at_averages if self._scan is not None and bucket.is_last() else None
        return _Looked(pending, self._look_at, bucket.spec, before=before)

    def run(self, bucket: GradBucket) -> Tensor:
        """As `start`, to the end, in this thread."""
        self._look_before(bucket)
        return _Looked(Landed(self._inner.run(bucket)), self._look_at, bucket.spec).wait()

    def _look_before(self, bucket: GradBucket) -> None:
        if self._check not in self.checks:  # the first bucket of a step
            self._begin(bucket.spec.device)
            self._scan = self._late.begin(self._inner) if self._can_be_late(bucket.spec) else None
            self._reaction.prepare(self._inner.states)
            self.checks.append(self._check)
        if isinstance(bucket, ZeroBucket):
            return
        kept, narrow = self._trusted and self._stay_in_grad(bucket), self._narrow(bucket.spec.dtype)
        if self._scan is not None:
            if kept:
                self._scan.keep(bucket)
            else:
                with on_stream_of_reductions(self._device, self._inner):
                    self._scan.look_at_gradients(bucket, narrow)
        elif kept:
            self._kept.append(bucket)
        elif (look := self._search.before(bucket, narrow)) is not None:
            self._gradients.append(look)

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
        self._gradients: list[Look] = []
        self._averages: list[Look] = []
        self._kept: list[GradBucket] = []
        self._scan = None
        self._reduced: list[BucketSpec] = []

    def _narrow(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype in which gradients of `dtype` may overflow before they are reduced."""
        narrow = self._inner.hook.narrowest(dtype) if self._trusted else dtype
        return None if narrow == dtype else narrow

    def _look_at(self, spec: BucketSpec, result: Tensor) -> None:
        if self._scan is not None:
            self._scan.add_average(spec, result)
        elif (look := self._search.after(spec, result)) is not None:
            self._averages.append(look)

    def _verify(self, step: int) -> None:
        """Exchange what ranks have found, if there may be something, and do what the policy says."""
        late, scan, inner = self._late.take(self._inner), self._scan, self._inner
        stepped = inner.optimizers.gradients_used
        try:
            inner.optimizers.clear_flag()
            if scan is not None:
                self._late.enqueue(scan, inner, self._narrow, step=step)
            if late is not None:
                self._read(late, stepped=stepped)
            report = self._report(step) if scan is None else None
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

    def _report(self, step: int) -> Report | None:
        found = examine([*self._gradients, *self._averages], self._device)
        count = len(self._gradients)
        gradients, averages = ([f for look in part for f in look] for part in (found[:count], found[count:]))
        if self._trusted and not averages:
            return None  # on all ranks: see Note [What a healthy step costs]
        if not self._trusted and not any_rank(bool(gradients or averages), self._inner.group, self._device):
            return None
        for bucket in self._kept:
            gradients += self._search.in_grads(bucket, self._narrow(bucket.spec.dtype))
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


class Reaction:
    """What a policy does about values that are not finite."""

    def __init__(self, policy: NonFinite) -> None:
        self._policy = policy
        self.skipped = 0
        """How many steps were skipped, as far as it is known."""
        self._in_a_row = 0
        self._last = -1
        self._shown = False

    def prepare(self, states: HookStates) -> None:
        """A step of a hook begins that may be dropped."""
        states.commit()  # of a backward that has failed
        states.can_roll_back = self._policy is not NonFinite.RECORD

    def react(self, report: Report, group: Group, states: Iterable[HookStates], *, drop: bool = True) -> None:
        """Record what was found, and raise StepRejected, or StepSkipped if `drop`, for a step that all ranks of `group` drop."""
        error = report.error(self._policy)
        flight_recorder.warn(str(error), rank=group.rank, group=group.name, step=report.step)
        skipped = self._policy is NonFinite.SKIP and drop
        if skipped or self._policy is NonFinite.RAISE:
            for one in states:
                one.roll_back()
        if self._policy is NonFinite.RAISE:
            raise StepRejected(error)
        if self._policy is NonFinite.SKIP:
            self.skipped += 1
            self._in_a_row = self._in_a_row + 1 if report.step == self._last + 1 else 1
            self._last = report.step
        if group.rank == 0:
            self._show(error)
        self._shown = True
        if skipped:
            raise StepSkipped(error)

    def _show(self, error: NonFiniteGradient) -> None:
        if not self._shown:
            warn_user(f"{error} Later ones are recorded only.")
        elif self._in_a_row in _MANY:
            warn_user(
                f"{self._in_a_row} steps in a row were skipped, so the model no longer trains. The last one: {error}"
            )


class _Looked:
    """A reduction whose result is looked at. `before`: what is done before it is waited for."""

    def __init__(
        self,
        pending: Pending,
        look_at: Callable[[BucketSpec, Tensor], None],
        spec: BucketSpec,
        *,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._pending, self._look_at, self._spec, self._before = pending, look_at, spec, before

    def wait(self) -> Tensor:
        """The result."""
        if self._before is not None:
            self._before()
        result = self._pending.wait()
        self._look_at(self._spec, result)
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


def examine(looks: Sequence[Look], device: torch.device) -> list[list[Found]]:
    """What is not finite, by look. Waits for the device, once if all is finite."""
    if not looks:
        return []
    probes = torch.stack([look.probe.to(device, torch.float32) for look in looks]).tolist()
    return [[] if math.isfinite(value) else look.find() for look, value in zip(looks, probes, strict=True)]

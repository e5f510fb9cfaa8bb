"""Checks whether the gradients of a step, and their averages, are finite (see `policies.NonFinite`).

Note [What a healthy step costs]
The averages are examined: on the host by one sum over each bucket, on a device by its largest absolute value (see
`collectives/finite.py`). If the hook passes NaN on to all ranks (`CommHook.passes_nonfinite`: `mean` does), that is all: averages
are the same bits on every rank, so either all ranks find them bad and exchange what they have found, or none does. The gradients
that they were made of are searched afterwards, in `.grad`. If they are views of the bucket they have been overwritten by then, so
such a bucket is examined before its reduction too.

Any other hook may hide a NaN, or give each rank another result. Then ranks check gradients as well, and exchange 8 bytes in every
step, since a rank that decided alone would leave the others waiting.

Nothing waits for CUDA until all reductions are enqueued, or at all where it can act alone: Note [Late results] in `late.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.collectives.finite import is_finite
from gradwire.groups.base import Group
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.policies import NonFinite
from gradwire.recorder import writer
from gradwire.reducer.buckets.buffers import ZeroBucket
from gradwire.reducer.buckets.layout import ParameterSpec
from gradwire.reducer.checks import nonfinite_report
from gradwire.reducer.checks.late import LateCheck, LateChecks
from gradwire.reducer.checks.nonfinite_search import Found, NonFiniteKind, Search, StepCheck
from gradwire.reducer.hook.driver import Finished, Pending
from gradwire.reducer.hook.hook_states import StepFork
from gradwire.reducer.hook.runner import HookRunner


class NonFiniteChecked:
    """A runner that checks every bucket of a step, and decides with all ranks what happens if one finds a non-finite value."""

    def __init__(
        self,
        inner: HookRunner,
        specs: Sequence[ParameterSpec],
        policy: NonFinite,
        *,
        overwritten: bool,
        in_torchs_ddp: bool = False,
    ) -> None:
        """`overwritten`: gradients are views of buckets. `in_torchs_ddp`: averages are in `.grad` before they are checked."""
        self._inner = inner
        self._specs = list(specs)
        self._policy = policy
        self._handler = nonfinite_report.NonFiniteHandler(policy)
        self._overwritten, self._in_torchs_ddp = overwritten, in_torchs_ddp
        self._late = LateChecks(self._specs, skips=policy is not NonFinite.RECORD)
        self._search = Search([spec.name for spec in specs])
        self._check: StepCheck | None = None
        """That of the step in progress, once a bucket was started."""
        self._fork: StepFork | None = None
        self._trusted = self._is_late = False
        self._device = torch.device("cpu")

    @property
    def name(self) -> str:
        return self._inner.name

    def buckets_changed(self) -> None:
        self._inner.buckets_changed()

    def start(self, bucket: GradBucket) -> Pending:
        check = self._before(bucket)
        return _Checked(self._inner.start(bucket), check, bucket.spec)

    def run(self, bucket: GradBucket) -> Tensor:
        check = self._before(bucket)
        return _Checked(Finished(self._inner.run(bucket)), check, bucket.spec).wait()

    def _before(self, bucket: GradBucket) -> StepCheck:
        check = self._check
        if check is None:
            check = self._check = self._begin(bucket.spec)
        if isinstance(bucket, ZeroBucket):
            return check
        if self._trusted and not self._overwritten and not bucket.spec.sparse:
            check.kept.append(bucket)
        else:
            check.add_gradients(bucket)
        return check

    def _begin(self, spec: BucketSpec) -> StepCheck:
        inner = self._inner
        self._device = spec.device
        self._trusted = inner.torch_hook is None and inner.outer is None and inner.hook.passes_nonfinite
        # Not if a bad step has to be undone in the state of a hook, and not in torch's DDP, which has no `finish_checks`.
        can_be_late = self._trusted and not self._in_torchs_ddp and inner.states.of(spec) is None
        self._is_late = can_be_late and self._late.begin(inner)
        self._commit()  # of a backward that has failed
        self._fork = None if self._policy is NonFinite.RECORD else inner.states.fork()
        return StepCheck(self._search, inner.hook if self._trusted else None)

    def drop_step(self) -> None:
        self._check = None
        self._inner.drop_step()

    def verify(self, step: int) -> Exception | None:
        """Exchange what ranks have found, if there may be something, and apply the policy."""
        inner, check, self._check = self._inner, self._check, None
        if check is None:
            return inner.verify(step)
        try:
            rejected = self._verify(check, step)
        except BaseException:
            self._forget_late()
            raise
        if rejected is not None:
            self._forget_late()
            if self._fork is not None:
                self._fork.drop()
        self._commit()
        return rejected or inner.verify(step)

    def _commit(self) -> None:
        if self._fork is not None:
            self._fork.commit()

    def _verify(self, check: StepCheck, step: int) -> nonfinite_report.StepRejected | None:
        inner, earlier = self._inner, self._late.take(self._inner)
        inner.optimizers.skip_if = None
        late = self._late.enqueue(check, inner, step=step) if self._is_late else None
        of_earlier = self._handle(earlier) if earlier is not None and earlier.is_bad() else None
        if of_earlier is not None and not isinstance(of_earlier, nonfinite_report.StepSkipped):
            return of_earlier
        # After a skipped step the host waits: gradients that were not zeroed are added to those of this step.
        if late is not None:
            rejected = self._handle(late, later=False) if of_earlier is not None and late.is_bad() else None
        else:
            rejected = self._wait(check, step)
        if rejected is None and of_earlier is not None and self._bad_gradients_left():
            self._handler.skipped += 1
            return of_earlier
        return rejected

    def _forget_late(self) -> None:
        self._late.take(self._inner)
        self._inner.optimizers.skip_if = None

    def _wait(self, check: StepCheck, step: int) -> nonfinite_report.StepRejected | None:
        averages = check.averages()
        if self._trusted:
            bad = bool(averages)  # on all ranks alike: see Note [What a healthy step costs]
        else:
            bad = nonfinite_report.any_rank(
                bool(averages or check.gradients(kept=False)), self._inner.group, self._device
            )
        if not bad:
            return None
        return self._report((check.gradients(kept=True), averages), step=step, hook=self.name, trusted=self._trusted)

    def _handle(self, late: LateCheck, *, later: bool = True) -> nonfinite_report.StepRejected | None:
        return self._report(late.check.released(), step=late.step, hook=late.hook, later=later)

    def _report(
        self, found: tuple[list[Found], list[Found]], *, step: int, hook: str, trusted: bool = True, later: bool = False
    ) -> nonfinite_report.StepRejected | None:
        group = self._inner.group
        report = nonfinite_report.NonFiniteReport(
            nonfinite_report.exchange(group, *found, device=self._device),
            [spec.name for spec in self._specs],
            [spec.shape for spec in self._specs],
            hook,
            averages_only=trusted,
            step=step,
            in_grads=self._in_torchs_ddp,
            later=later,
        )
        return self._handler.handle(report, group)

    def _bad_gradients_left(self) -> bool:
        """Whether gradients of a skipped step are still there: those of this step were added to them. Same on all ranks."""
        grads = [p.grad for _, p in self._inner.named_parameters]
        return any(grad is not None and not is_finite(grad) for grad in grads)

    @property
    def late(self) -> bool:
        return self._late.pending is not None

    @property
    def skipped(self) -> int:
        return self._handler.skipped

    def finish(self) -> None:
        """Wait for a result that would be read by the next step, and apply the policy. Every rank calls it."""
        late = self._late.take(self._inner)
        rejected = self._handle(late) if late is not None and late.is_bad() else None
        if isinstance(rejected, nonfinite_report.StepSkipped):
            if self._bad_gradients_left():
                for _, p in self._inner.named_parameters:
                    p.grad = None
        elif rejected is not None:
            raise rejected.error


class NonFiniteWatch:
    """Writes the first gradient of this rank that is not finite to the flight recorder, for the report of the run. For models on
    the CPU without a policy: elsewhere the host would have to wait. It costs a sum over each bucket."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._search: Search | None = Search(names)

    def __call__(self, bucket: GradBucket, group: Group, step: int) -> None:
        found = () if self._search is None else self._search.before(bucket, None).found
        if found and (recorder := writer.active) is not None:
            name, nan = self._names[found[0].parameter], found[0].kind is NonFiniteKind.NAN
            recorder.describe("nonfinite", {"rank": group.rank, "step": step, "parameter": name, "nan": nan})
            self._search = None  # once a parameter is NaN, every later gradient is


class _Checked:
    """A reduction whose result is checked."""

    def __init__(self, pending: Pending, check: StepCheck, spec: BucketSpec) -> None:
        self._pending, self._check, self._spec = pending, check, spec

    def wait(self) -> Tensor:
        result = self._pending.wait()
        self._check.add_average(self._spec, result)
        return result

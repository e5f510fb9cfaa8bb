"""Whether a hook's result is a mean: compared on one number per bucket (see `policies.ScaleCheck`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import HookError
from gradwire.groups.base import Group
from gradwire.hooks.bucket import GradBucket
from gradwire.policies import ScaleCheck
from gradwire.reducer.hook.driver import Pending


class ScaleChecked:
    """A reduction whose result is compared with the true mean's projection, once all reductions of the step are over."""

    def __init__(self, bucket: GradBucket, group: Group, policy: ScaleCheck, *, hook: str, weight: float) -> None:
        self._bucket = bucket
        self._group = group
        self._policy = policy
        self._hook = hook
        projection = project(bucket.buffer())
        self._contribution = torch.cat([projection, projection.new_ones(1)]) * weight
        self._pending: Pending | None = None
        self._result: Tensor | None = None

    def watch(self, pending: Pending) -> ScaleChecked:
        self._pending = pending
        return self

    def wait(self) -> Tensor:
        assert self._pending is not None
        self._result = self._pending.wait()
        return self._result

    def verify(self) -> HookError | None:
        """An error if the result is off by a factor."""
        assert self._result is not None
        truth = self._contribution.to(self._result.device)
        label = f"scale check of bucket {self._bucket.index()}"
        self._group.submit(all_reduce(truth, op=ReduceOp.SUM, label=label)).wait()
        total, norms, weights = truth.tolist()
        if not weights:
            return None
        expected, norm = total / weights, norms / weights
        if not math.isfinite(expected):
            return None  # that of a gradient, which is not the hook's fault: see `policies.NonFinite`
        got = float(project(self._result)[0])
        # Where the projection nearly cancels, rounding, whose size goes with the norm, makes its relative error meaningless.
        if abs(expected) < 0.1 * norm or abs(got - expected) <= self._policy.tolerance * abs(expected):
            return None
        world = self._group.size
        guess = " It looks like a sum: divide by the number of ranks." if _near(got, expected * world) else ""
        return HookError(
            f"scale check of hook {self._hook} on {self._bucket.spec}, rank {self._group.rank}: the result is "
            f"{got / expected:.3g} times the mean over {world} ranks.{guess}",
            hook=self._hook,
        )


def project(buffer: Tensor) -> Tensor:
    """The inner product with a fixed vector of signs, linear in the buffer and cheap; and the buffer's norm."""
    values = (buffer.coalesce().to_dense() if buffer.is_sparse else buffer).detach().reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.dtype.is_complex else values
    values = values.to(torch.float64)
    signs = torch.ones_like(values)
    signs[1::3] = -1
    return torch.stack([(values * signs).sum(), values.norm()])


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.05 * abs(b)

"""Whether a hook's result is a mean: compared on one number per bucket (see `policies.ScaleCheck`)."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import HookError
from gradwire.groups.base import Group
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.drive import Pending
from gradwire.policies import ScaleCheck


class ScaleChecked:
    """A reduction whose result is compared with the true mean's projection."""

    def __init__(
        self, pending: Pending, before: Tensor, bucket: GradBucket, group: Group, policy: ScaleCheck, hook: str
    ) -> None:
        self._pending = pending
        self._before = before
        self._bucket = bucket
        self._group = group
        self._policy = policy
        self._hook = hook

    @staticmethod
    def project(buffer: Tensor) -> Tensor:
        """The inner product with a fixed vector of signs, and its absolute size: linear in the buffer, and cheap."""
        values = (buffer.coalesce().values() if buffer.is_sparse else buffer).detach().reshape(-1)
        values = values.abs() if values.dtype.is_complex else values
        values = values.to(torch.float64)
        signs = torch.ones_like(values)
        signs[1::3] = -1
        return torch.stack([(values * signs).sum(), values.abs().sum()])

    def wait(self) -> Tensor:
        """The result, or HookError if it is off by a factor."""
        result = self._pending.wait()
        truth = self._before.clone()
        label = f"scale check of bucket {self._bucket.index()}"
        self._group.submit(all_reduce(truth, op=ReduceOp.AVG, label=label)).wait()
        expected, size = truth.tolist()
        got = float(self.project(result)[0])
        # Where the projection nearly cancels, its relative error says nothing.
        if abs(expected) < 1e-3 * size or abs(got - expected) <= self._policy.tolerance * abs(expected):
            return result
        world = self._group.size
        guess = "It looks like a sum: divide by the number of ranks." if _near(got, expected * world) else ""
        raise HookError(
            f"scale check of hook {self._hook} on bucket {self._bucket.index()} (parameters "
            f"{', '.join(self._bucket.names()[:4])}), rank {self._group.rank}: the result is {got / expected:.3g} times the "
            f"mean over {world} ranks. {guess}",
            hook=self._hook,
        )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 0.05 * abs(b)

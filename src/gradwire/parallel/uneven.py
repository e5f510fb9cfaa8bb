"""Uneven inputs: what a rank does before a forward under `join()`, and after it has run out of inputs."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import UsageError
from gradwire.hooks.bucket import GradBucket
from gradwire.interop.join import Join, JoinHook, ShadowHook
from gradwire.parallel.replica import Replica


class Uneven:
    """One replica's part in torch's Join."""

    def __init__(self, replica: Replica, ddp: weakref.ref[Any]) -> None:
        self._replica = replica
        self._ddp = ddp
        self._divide_by_all = True
        self.authoritative_rank = 0

    def context(self, model: Any, divide: bool, enable: bool, throw: bool) -> AbstractContextManager[Any]:
        """The context manager around a training loop."""
        hook = self._replica.hook
        if enable and self._replica.torch_hook is None and hook.local:
            raise UsageError(
                f"join() with {hook!r}: a rank that has run out of inputs makes no steps, so it would miss the outer steps of the "
                "others. Give every rank the same number of batches."
            )
        context: AbstractContextManager[Any] = _Join([model], enable, throw, divide_by_initial_world_size=divide)
        return context

    def hook(self, *, divide: bool) -> JoinHook:
        """What Join runs once this rank has joined."""
        self._divide_by_all = divide
        ddp = self._ddp()
        if ddp is not None and ddp.logger is not None:
            ddp.logger.joins_uneven_inputs()
        return ShadowHook(self)

    def before_forward(self, work: Any) -> None:
        """This rank still has inputs; `work` counts how many do."""
        self._replica.divisor = None
        if work is not None and not self._divide_by_all:
            work.wait()
            self._replica.divisor = int(work.result()[0].item())

    def _ask(self, value: float, op: ReduceOp) -> float:
        answer = torch.tensor([value], device=self._replica.parameters[0].device)
        self._replica.group.submit(all_reduce(answer, op=op, label="uneven inputs")).wait()
        return answer.item()

    def announce_sync(self, sync: bool) -> None:
        """Tell the ranks that have joined whether this step's backward synchronises, and so how many ranks still train."""
        self._ask(float(sync), ReduceOp.SUM)

    def common_rank(self, candidate: bool) -> int:
        """The highest rank that is a candidate; all ranks ask together."""
        return int(self._ask(float(self._replica.group.rank if candidate else -1), ReduceOp.MAX))

    def shadow_step(self) -> None:
        """Match the collectives of one step of the ranks that still have inputs."""
        replica = self._replica
        replica.reducer.rebuild()
        ddp = self._ddp()
        if ddp is not None and ddp.will_sync_module_buffers():
            replica.sync_buffers(self.common_rank(False))
        training = int(self._ask(0.0, ReduceOp.SUM))
        replica.sync_buffers_next = training > 0
        if not replica.sync_buffers_next:
            return
        # The same collectives as the others, and the same result: the mean over all ranks, or over those that still train. The
        # zeros that this rank brings have no weight.
        replica.divisor = None if self._divide_by_all else training
        weight, replica.weight = replica.weight, 0.0
        try:
            for reduction in [replica.start(bucket) for bucket in _zeros(replica)]:
                reduction.wait()
            replica.reducer.shadow_step_ended()
        finally:
            replica.weight = weight

    def sync_final(self, is_last_joiner: bool) -> None:
        """Make everybody's model that of a rank that joined last."""
        self.authoritative_rank = self.common_rank(is_last_joiner)
        self._replica.broadcast_state(self.authoritative_rank)


class _Join(Join):
    """torch's Join, which asks `dist` for the rank, and so knows only groups that were made there."""

    def _extract_dist_info(self) -> None:
        (joinable,) = self._joinables
        self._process_group = joinable.join_process_group
        self._device = joinable.join_device
        self._rank = self._process_group.rank()


def _zeros(replica: Replica) -> list[GradBucket]:
    """The buckets with nothing in them, in launch order."""
    reducer = replica.reducer
    buckets = []
    for storage, members in zip(reducer.storages, reducer.layout.members, strict=True):
        parameters = [reducer.parameters[i] for i in members]
        spec = storage.spec
        shape = parameters[0].shape if spec.sparse else (spec.numel,)
        buffer = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        if spec.sparse:
            buffer = buffer.to_sparse(1)
        last = storage is reducer.storages[-1]
        buckets.append(GradBucket(storage.spec, buffer, parameters, is_last=last))
    return buckets

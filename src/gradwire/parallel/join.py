"""Uneven inputs: what a rank does before a forward under `join()`, and after it has run out of inputs.

Note [Join over the model's group]
torch's Join counts the ranks that still have inputs over the process group. Under `model.join()` the count uses the model's group
instead, so that a rank that waits for it sees an abort, with the rank and the reason, on every engine. An exception that leaves the
context on one rank aborts the group, since the other ranks would wait for this rank's next step. With torch's own Join, as for
several joinables, torch's protocol is kept, and an exception outside forward and backward is not reported.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import EarlyTermination, UsageError
from gradwire.groups.work import Work
from gradwire.parallel.replica import Replica


class UnevenInputs(JoinHook):
    """One replica's part in torch's Join, which runs the hook on a rank that has run out of inputs, until all have joined."""

    def __init__(self, replica: Replica, ddp: weakref.ref[Any]) -> None:
        self._replica = replica
        self._ddp = ddp
        self._divide_by_all = True
        self._own_join = False
        self._counted: Work | None = None
        self.authoritative_rank = 0

    def context(self, model: Any, divide: bool, enable: bool, throw: bool) -> AbstractContextManager[Any]:
        """The context manager around a training loop."""
        hook = self._replica.hook
        if enable and self._replica.runner.torch_hook is None and hook.local:
            raise UsageError(
                f"join() with {hook!r}: a rank that has run out of inputs makes no steps, so it would miss their outer steps. "
                "Give every rank the same number of batches."
            )
        context: AbstractContextManager[Any] = _Join(self, model, enable, throw, divide)
        self._own_join = True
        return context

    def hook(self, *, divide: bool) -> JoinHook:
        """The hook that Join runs once this rank has joined."""
        self._divide_by_all = divide
        self._own_join = False
        ddp = self._ddp()
        if ddp is not None and ddp.logger is not None:
            ddp.logger.fixed["join_uneven_inputs"] = 1
        return self

    def before_forward(self, model: Joinable) -> None:
        """Take part in the count of ranks that still have inputs."""
        replica, config = self._replica, model._join_config
        replica.runner.divisor, replica.runner.uneven = None, bool(config.enable)
        if not config.enable:
            return
        replica.recovery.recover_if_failed()
        if not self._own_join:
            work: Any = Join.notify_join_context(model)
            if work is not None and not self._divide_by_all:
                work.wait()
                replica.runner.divisor = int(work.result()[0].item())
            return
        count, self._counted = self._submit(1.0)
        if config.throw_on_early_termination:
            self._counted.wait()
            if self.ask(0.0):
                raise EarlyTermination(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks, because of "
                    "throw_on_early_termination=True."
                )
        if not self._divide_by_all:
            self._counted.wait()
            replica.runner.divisor = int(count.item())

    def exit(self, error: BaseException | None, shadow: Callable[[], None]) -> None:
        """Leave the context: with `error`, on all ranks; without one, once `shadow` has matched the steps of all other ranks."""
        if error is not None:
            if not isinstance(error, EarlyTermination):
                self._replica.recovery.loop_failed(error)
            return
        try:
            self._replica.recovery.recover_if_failed()
            shadow()
        except EarlyTermination:
            raise
        except BaseException as failure:
            self._replica.recovery.loop_failed(failure)
            raise

    def _submit(self, value: float, op: ReduceOp = ReduceOp.SUM) -> tuple[Tensor, Work]:
        answer = torch.tensor([value], device=self._replica.parameters[0].device)
        return answer, self._replica.group.submit(all_reduce(answer, op=op, label="uneven inputs"))

    def ask(self, value: float, op: ReduceOp = ReduceOp.SUM) -> float:
        answer, work = self._submit(value, op)
        work.wait()
        return answer.item()

    def announce_sync(self, sync: bool) -> None:
        """Announce to the ranks that have joined whether this step's backward synchronizes, and so how many ranks still train."""
        self.ask(float(sync))
        if self._counted is not None:
            self._counted.wait()  # returns at once: the operation after it has finished
            self._counted = None

    def common_rank(self, candidate: bool) -> int:
        """The highest rank that is a candidate. Every rank calls it."""
        return int(self.ask(float(self._replica.group.rank if candidate else -1), ReduceOp.MAX))

    def main_hook(self) -> None:
        """Match the collectives of one step of the ranks that still have inputs."""
        replica = self._replica
        replica.reducer.rebuild()
        ddp = self._ddp()
        if ddp is not None and ddp.will_sync_module_buffers():
            replica.state.sync_buffers(self.common_rank(False))
        training = int(self.ask(0.0))
        replica.sync_buffers_next = training > 0
        if not replica.sync_buffers_next:
            return
        # The same collectives as the others, and the same result: the mean over all ranks, or over those that still train. The
        # zeros that this rank contributes have no weight.
        runner, reducer = replica.runner, replica.reducer
        runner.divisor, runner.uneven = None if self._divide_by_all else training, True
        weight, runner.weight = runner.weight, 0.0
        try:
            for reduction in [reducer.reductions.runner.start(bucket) for bucket in reducer.buckets.zeros()]:
                reduction.wait()
            reducer.shadow_step_ended()
        finally:
            runner.weight = weight

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of a rank that joined last."""
        self.authoritative_rank = self.common_rank(is_last_joiner)
        self._replica.state.broadcast(self.authoritative_rank)


class _Join(Join):
    """torch's Join over the model's group: see Note [Join over the model's group]."""

    def __init__(self, uneven: UnevenInputs, model: Joinable, enable: bool, throw: bool, divide: bool) -> None:
        self._uneven = uneven
        super().__init__([model], enable, throw, divide_by_initial_world_size=divide)

    def __enter__(self) -> None:
        """Only configures the model. `__exit__` undoes it, which torch's does not."""
        self._set_joinable_configs()

    def _extract_dist_info(self) -> None:
        """Not by `dist`, which has no entry for a gradwire group."""
        (joinable,) = self._joinables
        self._process_group = joinable.join_process_group
        self._device = joinable.join_device
        self._rank = self._process_group.rank()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._enable:
                self._uneven.exit(error, lambda: super(_Join, self).__exit__(None, None, None))
        finally:
            for joinable in self._joinables:
                joinable._join_config = _JoinConfig.construct_disabled_join_config()

    def _get_num_nonjoined_procs(self) -> int:
        return int(self._uneven.ask(0.0))

    def _notify_procs_to_terminate(self) -> NoReturn:
        self._uneven.ask(1.0)
        raise EarlyTermination(f"Rank {self._rank} exhausted all inputs.")

"""`HookedGroup`: a group whose gradients are reduced by a hook, for code that takes a process group and no hook.

FSDP2 averages gradients over the replicas of a mesh by `dist.all_reduce`, before any hook of its own, so a hook can take the place
of that all-reduce only as the process group of the mesh dimension.

Note [What is a gradient]
A sum or average of one floating-point tensor, all-reduced or reduced and scattered, that is submitted while autograd runs a
backward, in any of its threads. All else passes as it is: the loss, gradient norms and metrics, which are reduced between
backwards, maxima, integers, broadcasts. All ranks submit the same operations in the same order, so they decide alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from gradwire.autograd.backward_errors import BEGINS, around_backward
from gradwire.collectives import Collective, OpKind, ReduceOp, Scope
from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups.base import Group
from gradwire.groups.c10d.work import C10dWork, CompletionPoller
from gradwire.groups.forked import finalize_here
from gradwire.groups.work import Work
from gradwire.groups.wrappers import GroupWrapper, TrackedWrapper
from gradwire.hooks.arguments import check_hooks, refuse_traits
from gradwire.hooks.base import CommHook, Trait
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.dense import Mean
from gradwire.interop.checkpointed_hook import CheckpointedHook
from gradwire.interop.gradient_places import GradientPlaces
from gradwire.reducer.hook.runner import HookRunner
from gradwire.reducer.model_events import ModelEvents

_REDUCTIONS = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER_TENSOR)
_SUMS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)


def check_gradient_hook(doing: str, hook: CommHook) -> None:
    """Refuse what a HookedGroup cannot run."""
    check_hooks(doing, hook=hook)
    if hook.local:
        raise UsageError(
            f"{doing}: {hook!r} averages parameters after the optimizer's step, of which a group knows nothing. On a mesh, use "
            "interop.outer_steps_on_shards; else DistributedDataParallel or replicate(), or a hook that averages gradients."
        )
    flat = (
        f"{hook!r} compresses matrices, but a group is given flat gradients without shapes, so it would send all of them whole, "
        "and dion would not compute the direction of a step. Use dion, with optim.Dion, and power_sgd in "
        "DistributedDataParallel or replicate(); here, power_sgd(rank, batched=True) makes a matrix of a flat gradient."
    )
    refuse_traits(doing, hook, {Trait.MATRICES: flat})


class HookedGroup(CheckpointedHook, TrackedWrapper):
    """Reduces gradients by `hook`; see Note [What is a gradient] for what is one. Everything else passes as it is.

    The divisor stays the caller's: a sum is the mean that the hook computes times the number of ranks. With `mean()` everything
    passes as it is. On the CPU the hook runs on a thread of the group, so backward continues meanwhile; on CUDA it is enqueued.

    >>> from gradwire.groups import ThreadGroup
    >>> from gradwire.hooks import quantize
    >>> (group,) = (HookedGroup(inner, quantize(bits=8)) for inner in ThreadGroup.world(1))
    >>> x = torch.tensor([1.0, 2.0])
    >>> group.all_reduce(x).wait() and x  # not in a backward
    tensor([1., 2.])
    >>> group.close()
    """

    def __init__(self, inner: Group, hook: CommHook) -> None:
        check_gradient_hook("HookedGroup", hook)
        super().__init__(inner)
        self.hook = hook
        self._steps_of_hook = _Steps(inner)
        self._runner = HookRunner(hook, self._steps_of_hook)
        self._events = ModelEvents(inner)
        self._places = GradientPlaces(hook)
        self._running: dict[int, object] = {}
        """The outermost backwards that run, by their threads. Graph tasks of re-entrant ones are parts of them."""
        self._reduced_in: object = None
        """The backward of the last gradient."""
        self._poller = CompletionPoller(f"{self.name}-{self.rank}")
        self._poller_finalizer = finalize_here(self, self._poller.stop, 2.0)
        around_backward(BEGINS, self._begins)

    def rewrap(self, inner: Group) -> Group:
        return HookedGroup(inner, self.hook)

    def orders_streams(self, device: torch.device) -> bool:
        return self.inner.orders_streams(device)

    def _begins(self, tensors: object) -> Any:
        thread = threading.get_ident()
        self._running[thread] = object()
        return partial(self._running.pop, thread, None)

    def _is_gradient(self, op: Collective) -> bool:
        if op.kind not in _REDUCTIONS or op.reduce_op not in _SUMS or op.scope is not Scope.WORLD:
            return False
        if torch._C._current_graph_task_id() == -1 or type(self.hook) is Mean or len(op.inputs) != 1:
            return False
        t = op.inputs[0]
        return t.dtype.is_floating_point and not t.is_sparse and t.numel() > 0

    def _next_gradient(self, op: Collective) -> Callable[[], None]:
        """Reduces the next gradient of this backward, or the first one of a new backward."""
        running = dict(self._running)
        backward = running.get(threading.get_ident()) or torch._C._current_graph_task_id()
        if len(running) == 1:  # perhaps in a thread of the engine
            [backward] = running.values()
        begins = backward != self._reduced_in
        if begins:
            self._reduced_in = backward
            self._places.begin()
        return partial(self._run_hook, op, self._places.next(op.inputs[0]), begins)

    def submit(self, op: Collective) -> Work:
        if op.kind.is_p2p:
            return self._pass_through(op)
        with self._order:
            gradient = self._next_gradient(op) if self._is_gradient(op) else None
            if op.device.type == "cuda":
                self._drain()
                return self._pass_through(op) if gradient is None else self._reduce_on_stream(op, gradient)
            if gradient is None and self._worker.idle:
                return self._pass_through(op)
            work = self.begin(op)
            self._worker.put(partial(self._run if gradient is None else partial(self._reduce, gradient), work))
        return work

    def _pass_through(self, op: Collective) -> Work:
        work = self.begin(op, _Passed)

        def settle(inner: Work) -> None:
            self.steps.pop(work.seq, None)
            work._settle([inner.exception()], inner.source)

        try:
            self.steps[work.seq] = inner = self.inner.submit(op)
            if self.inner.orders_streams(op.device):
                work.inner = inner
            inner.add_done_callback(settle)
        except Exception as error:
            work.fail(error)
        return work

    def _reduce(self, gradient: Callable[[], None], work: Work) -> None:
        """On the worker's thread."""
        if work.is_completed():  # aborted
            return
        work.ledger.started(work, time.perf_counter())
        self._steps_of_hook.of(work, self.steps)
        try:
            gradient()
            work.finish()
        except CollectiveTimeout as error:
            work.fail(self.late(work, error))
        except BaseException as error:  # SystemExit too: the thread is needed again
            self._failed(work, error)
        finally:
            self._steps_of_hook.of(None, self.steps)
            self.steps.pop(work.seq, None)

    def _reduce_on_stream(self, op: Collective, gradient: Callable[[], None]) -> Work:
        work = self.begin(op, C10dWork)
        try:
            gradient()
            work.watch_stream(self._poller)
        except BaseException as error:
            self._failed(work, error)
        return work

    @torch.no_grad()
    def _run_hook(self, op: Collective, spec: BucketSpec, begins: bool) -> None:
        """Reduce a gradient, the first of a backward if it `begins`, and write the result where the caller expects it."""
        runner = self._runner
        if begins:
            runner.states.next_step()
        scatters = op.kind is OpKind.REDUCE_SCATTER_TENSOR
        flat = op.inputs[0].contiguous().view(-1)
        if scatters and flat.data_ptr() == op.inputs[0].data_ptr():
            flat = flat.clone()  # the hook may overwrite it, and it is the caller's
        if op.factor is not None:
            flat.mul_(op.factor)
        bucket, output = GradBucket(spec, flat, (), is_last=False), op.outputs[0]
        with self._events.reduction(spec, runner.step, hook=runner.name):
            if scatters:
                value = runner.run_scattered(bucket)
            else:
                value = runner.start(bucket).wait() if flat.is_cuda else runner.run(bucket)
            output.copy_(value.view(output.shape))
            if op.reduce_op is not ReduceOp.AVG:
                output.mul_(runner.group.size)

    def _failed(self, work: Work, error: BaseException) -> None:
        work.fail(error)
        if not isinstance(error, GroupError):  # of this rank alone, perhaps: the others wait for its next collective
            self.inner.abort(f"{self.hook!r} failed on rank {self.rank} with {type(error).__name__}: {error}")

    def _drain(self) -> None:
        if self._worker.idle:
            return
        done = threading.Event()
        self._worker.put(done.set)
        if not done.wait(self.timeout):
            raise CollectiveTimeout(
                f"{self}: reductions of tensors in the host's memory are still at work after {self.timeout:.3g} s, and one on a "
                "GPU cannot begin. Find out what the hook computes between its collectives."
            )

    def hook_state_dict(self) -> dict[str, Any]:
        """The hook's state on this rank: see `Replica.hook_state_dict`. Gradients are numbered in the order of their reductions."""
        self._drain()
        return self._runner.state_dict(gradients=self._places.saved())

    def load_hook_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state. Every rank of the group calls it, between steps."""
        self._drain()
        cuda = torch.device("cuda") if torch.cuda.is_available() else None
        on_cuda = cuda is not None and self.inner.orders_streams(cuda)
        self._load(saved, torch.device("cuda" if on_cuda else "cpu"))
        if "gradients" in saved:
            self._places.load(saved["gradients"])

    def _release(self) -> None:
        super()._release()
        self._runner.close()
        self._poller_finalizer()


class _Passed(Work):
    """An operation that passes through a group that orders streams: to wait for it orders the current stream."""

    inner: Work | None = None

    def wait_settled(self, limit: float) -> bool:
        return super().wait_settled(limit) if self.inner is None else self.inner.wait_settled(limit)


class _Steps(GroupWrapper):
    """The inner group for the hook: what it submits are the steps of an operation, and have what is left of its time."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.name = inner.name
        self._work: Work | None = None
        self._steps: dict[int, Work] = {}

    def of(self, work: Work | None, steps: dict[int, Work]) -> None:
        """From now on, of `work`; `steps` has the current one."""
        self._work, self._steps = work, steps

    def submit(self, op: Collective) -> Work:
        work = self._work
        if work is None:  # on CUDA streams nothing waits
            return self.inner.submit(op)
        left = work.deadline - time.perf_counter()
        if left <= 0:
            work.ledger.expire(work)
        self._steps[work.seq] = step = self.inner.submit(op.within(max(left, 1e-3)))
        return step

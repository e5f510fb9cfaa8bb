"""`HookedGroup`: a group whose gradients are reduced by a hook, for code that takes a process group and no hook.

FSDP2 averages gradients over the replicas of a mesh by `dist.all_reduce`, before any hook of its own, so a hook can take the place
of that all-reduce only as the process group of the mesh dimension.

Note [What is a gradient]
A sum or average of one floating-point tensor, all-reduced or reduced and scattered, that is submitted while autograd runs a
backward, in any of its threads. All else passes as it is: the loss, gradient norms and metrics, which are reduced between
backwards, maxima, integers, broadcasts. All ranks submit the same operations in the same order, so they decide alike.

Note [Which gradient is which]
A hook's state belongs to a gradient, and the operation does not name it. But a model reduces its gradients in the same order in
each backward. So a gradient is identified by those before it in the same backward: by the lengths and dtypes of all of them.
Backwards that begin alike and continue differently (two models that share the group) thus have states of their own; models of equal
shapes do not. What the first backwards reduce is learned at once, since torch's DDP has other buckets in its first ones; later a
sequence is learned when it occurs again. From where a backward departs from what was learned, states belong to lengths and dtypes.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradwire.autograd.backward_errors import BEGINS, around_backward
from gradwire.collectives import Collective, OpKind, ReduceOp, Scope
from gradwire.errors import CollectiveTimeout, GroupError, UsageError
from gradwire.groups.base import Group
from gradwire.groups.c10d.work import C10dWork, CompletionPoller
from gradwire.groups.forked import finalize_here
from gradwire.groups.work import Work
from gradwire.groups.wrappers import TrackedWrapper
from gradwire.hooks.arguments import check_hooks, refuse_traits
from gradwire.hooks.base import CommHook, Trait
from gradwire.hooks.bucket import BucketSpec, GradBucket
from gradwire.hooks.dense import Mean
from gradwire.interop.checkpointed_hook import CheckpointedHook
from gradwire.reducer.hook.driver import Submit
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
        self._runner = HookRunner(hook, inner)
        self._events = ModelEvents(inner)
        self._places = _Places(hook)
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

    def _next_gradient(self, op: Collective) -> Callable[[Submit | None], None]:
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
            run = partial(self._run, work, self._run_program)
            self._worker.put(run if gradient is None else partial(self._reduce, work, gradient))
        return work

    def _reduce(self, work: Work, gradient: Callable[[Submit | None], None]) -> None:
        """On the worker's thread."""
        if not work.is_completed():  # aborted
            self._run(work, lambda work: gradient(partial(self.submit_step, work)))
            self._abort_if_failed(work)

    def _reduce_on_stream(self, op: Collective, gradient: Callable[[Submit | None], None]) -> Work:
        work = self.begin(op, C10dWork)
        try:
            gradient(None)
            work.watch_stream(self._poller)
        except BaseException as error:
            work.fail(error)
            self._abort_if_failed(work)
        return work

    @torch.no_grad()
    def _run_hook(self, op: Collective, spec: BucketSpec, begins: bool, submit: Submit | None) -> None:
        """Reduce a gradient, the first of a backward if it `begins`, and write the result where the caller expects it. With
        `submit` the steps are a part of an operation; on CUDA streams nothing waits for them."""
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
                value = runner.run_scattered(bucket, submit)
            else:
                value = runner.start(bucket).wait() if flat.is_cuda else runner.run(bucket, submit)
            output.copy_(value.view(output.shape))
            if op.reduce_op is not ReduceOp.AVG:
                output.mul_(runner.group.size)

    def _abort_if_failed(self, work: Work) -> None:
        error = work.exception()
        # Of this rank alone, perhaps: the others wait for its next collective.
        if not isinstance(error, GroupError | None):
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


class _Places:
    """See Note [Which gradient is which]."""

    _LEARNED_AT_ONCE = 4
    _LEARNED_LATER = 8

    def __init__(self, hook: CommHook) -> None:
        self._hook = hook
        self._numbers: dict[tuple[Any, ...], int] = {}
        """Of gradients: those that were learned by (number of the one before, length, dtype), the others by (None, how many equal
        ones came before in the same backward, length, dtype)."""
        self._backwards = self._learned_later = 0
        self._now: list[tuple[int, str]] = []
        self._departed: deque[tuple[tuple[int, str], ...]] = deque(maxlen=2 * self._LEARNED_LATER)
        """Backwards that departed from what was learned: the last ones."""
        self._at: int | None = -1
        """The number of the last gradient; None after a departure."""
        self._warned = not hook.structure  # nothing depends on it then

    def begin(self) -> None:
        """The last backward is over, and another one begins."""
        last, self._now = tuple(self._now), []
        if self._at is None:
            if last in self._departed and self._learned_later < self._LEARNED_LATER:
                self._learned_later += 1
                self._at = -1
                for what in last:
                    self._at = self._number(*what, learn=True)
                self._departed.remove(last)
            else:
                self._departed.append(last)
        elif last and any(before == self._at for before, *_ in self._numbers):
            self._warn(f"the last one ended after {len(last)}")
        self._backwards += 1
        self._at = -1

    def next(self, gradient: Tensor) -> BucketSpec:
        """The bucket of the next gradient of this backward."""
        what = numel, dtype = gradient.numel(), str(gradient.dtype).removeprefix("torch.")
        same = self._now.count(what)
        self._now.append(what)
        if self._at is not None:
            self._at = self._number(numel, dtype, learn=self._backwards <= self._LEARNED_AT_ONCE)
            if self._at is None:
                self._warn(f"number {len(self._now)} of this one, of {numel} elements in {dtype}, is new")
        number = self._at
        if number is None:
            number = self._numbers.setdefault((None, same, numel, dtype), len(self._numbers))
        name = f"gradient {number} of {numel} elements in {dtype}"
        return BucketSpec(number, (name,), ((numel,),), ((1,),), gradient.dtype, gradient.device)

    def _number(self, numel: int, dtype: str, *, learn: bool) -> int | None:
        """That of the gradient after the last one, if it was learned."""
        key = (self._at, numel, dtype)
        if learn and key not in self._numbers:
            self._numbers[key] = len(self._numbers)
        return self._numbers.get(key)

    def saved(self) -> dict[str, Any]:
        """What a state needs to be loaded for the same gradients."""
        return {"keys": [list(key) for key in self._numbers], "backwards": self._backwards}

    def load(self, saved: Mapping[str, Any]) -> None:
        self._numbers = {tuple(key): number for number, key in enumerate(saved["keys"])}
        self._backwards, self._now, self._at = int(saved["backwards"]), [], -1

    def _warn(self, how: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"HookedGroup({self._hook!r}): backwards differ in the gradients that they reduce: {how}. A group does not learn "
                "the names of gradients, so the hook's state belongs to places in this sequence, and from the first difference on "
                "to lengths, until the sequence recurs. If layers are skipped or frozen from step to step, use a hook without "
                "state, or one that gets names: as_fsdp_hook, or DistributedDataParallel. Of many models, give each its own group.",
                stacklevel=2,
            )

"""Communication hooks written for torch, `hook(state, bucket) -> Future`, checked and run on our buckets.

The rules are torch's (python_comm_hook.cpp); a result is checked before it touches a gradient, and every error names the hook, the
bucket, its parameters, the rank and what was returned.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket as TorchGradBucket

from gradwire.errors import CollectiveTimeout, GroupError, HookError, UsageError, UsageTypeError, again
from gradwire.groups.base import Group
from gradwire.groups.completion import name_of
from gradwire.hooks.arguments import refuse_unfinished
from gradwire.hooks.bucket import GradBucket
from gradwire.hooks.pump import describe

_LOOK_EVERY = 0.5
TorchHook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def check_torch_hook(hook: Any) -> None:
    """Raise unless `hook` can be called with a state and a bucket. Any callable will do, with any parameter names."""
    refuse_unfinished("register_comm_hook", hook)
    if not callable(hook):
        raise UsageTypeError(
            f"Communication hook must be callable. Got {type(hook).__name__}: {hook!r}. "
            "Pass a function hook(state, bucket) that returns a torch.futures.Future."
        )
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (TypeError, ValueError):
        return  # a callable in C has none; what it returns is checked anyway
    except Exception:  # whatever evaluating an annotation may raise: a name that only a type checker imports, say
        signature = inspect.signature(hook)
    positional = [p for p in signature.parameters.values() if p.kind <= p.VAR_POSITIONAL]
    named = signature.parameters.get("bucket") or [*positional, None, None][1]
    annotation = inspect.Parameter.empty if named is None else named.annotation
    if annotation not in (inspect.Parameter.empty, TorchGradBucket, GradBucket, Any, object) and not (
        isinstance(annotation, str) and annotation.rpartition(".")[2] in ("GradBucket", "Any")
    ):
        raise UsageError(
            f"Communication hook: bucket annotation should be dist.GradBucket. {name_of(hook)!r} says {annotation!r}."
        )
    returns = signature.return_annotation
    allowed = (inspect.Signature.empty, torch.futures.Future[torch.Tensor], torch.futures.Future, Any)
    if returns not in allowed and not (isinstance(returns, str) and ("Future" in returns or returns.endswith("Any"))):
        raise UsageError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor]. "
            f"{name_of(hook)!r} says {returns!r}."
        )


class TorchHookRun:
    """One call of a torch-style hook, under way."""

    def __init__(self, hook: TorchHook, state: Any, bucket: GradBucket, group: Group, *, step: int) -> None:
        self._bucket, self._group = bucket, group
        self._hook_name = name_of(hook)
        self._where = describe(repr(self._hook_name), bucket.spec, group.rank, step)
        self._given = bucket.buffer()
        try:
            future = hook(state, bucket)
        except Exception as error:
            if not isinstance(error, GroupError):
                error.add_note(f"raised by {self._where}")
                if state is None and not torch.distributed.is_initialized():
                    error.add_note(
                        "Hooks of torch communicate over the process group that is their state, or torch.distributed's default "
                        "one, which does not exist here: register_comm_hook(gw.as_process_group(group), hook) passes the model's."
                    )
            raise
        if not isinstance(future, torch._C.Future):  # torch.futures.Future, and what c10d's Works hand out
            kind = type(future)
            raise HookError(
                f"{self._where}: DDP communication hook's callback must return a torch.futures.Future object, but got "
                f"{kind.__module__}.{kind.__qualname__}. Wrap the result: fut = torch.futures.Future(); fut.set_result(t).",
                hook=self._hook_name,
            )
        self._future = future
        self._works = list(group.ledger.pending.values())

    def wait(self) -> Tensor:
        """The checked result."""
        try:
            self._await()
            value = torch._C.Future.wait(self._future)  # not torch.futures.Future's, whose frame would hold the Future
        except Exception as error:
            if not isinstance(error, GroupError):  # of which all ranks and operations may share one
                if self._group.failure is not None:
                    raise again(self._group.failure) from error
                self._raise_failure_of_work(error)
                error.add_note(f"raised in the Future of {self._where}")
            raise
        finally:
            # A Future keeps what it failed with where the collector cannot see it, and that keeps all frames of the traceback.
            del self._future, self._works
        return self._check(value)

    def _raise_failure_of_work(self, error: Exception | None) -> None:
        """Raise what an operation that the hook began on the group failed with: then() has wrapped it beyond recognition. One whose
        time is up fails now, with the ranks that it waits for."""
        for work in self._works:
            if time.perf_counter() >= work.deadline:
                work.ledger.expire(work)
        for work in self._works:
            failure = work.exception()
            if failure is not None:
                raise again(failure) from error

    def _await(self) -> None:
        """Until the Future is done; its own wait knows no timeout."""
        if self._future.done():
            return
        done = threading.Event()
        self._future.add_done_callback(lambda _: done.set())
        deadline = time.perf_counter() + self._group.timeout
        # The hook's own communication is not the group's, so a peer that gave this step up is looked for here.
        while not done.wait(min(_LOOK_EVERY, max(0.0, deadline - time.perf_counter()))):
            if time.perf_counter() >= deadline:
                self._raise_failure_of_work(None)
                raise CollectiveTimeout(
                    f"{self._where}: its Future was not completed after {self._group.timeout:.3g} s. Complete it with "
                    "set_result or set_exception on every path, or raise the group's timeout."
                )
            self._group.check_peers()

    def _check(self, value: Any) -> Tensor:
        given, now = self._given, self._bucket.buffer()
        if not isinstance(value, Tensor):
            kind = "None" if value is None else f"{type(value).__module__}.{type(value).__qualname__}"
            raise self._bad(f"a Future of {kind}", "a Future of one tensor")
        if value.is_sparse != given.is_sparse:
            raise self._bad(f"a {value.layout} tensor", "one of the bucket's layout")
        if value.is_sparse and value.shape != now.shape:
            raise self._bad(f"a sparse tensor of {list(value.shape)}", f"one of {list(now.shape)}")
        if not value.is_sparse and value.numel() != given.numel():
            raise self._bad(f"a tensor of {value.numel()} elements", f"one of {given.numel()}, as long as the bucket")
        if value.device.type != given.device.type:
            raise self._bad(f"a tensor on {value.device}", f"one on {given.device}")
        # A hook that put a buffer of another dtype into the bucket asked for the conversion back.
        if value.dtype != given.dtype and value.dtype != now.dtype:
            raise self._bad(
                f"a {value.dtype} tensor", f"one of {given.dtype}, or bucket.set_buffer() with that dtype first"
            )
        return value

    def _bad(self, got: str, expected: str) -> HookError:
        return HookError(f"{self._where}: returned {got}, expected {expected}.", hook=self._hook_name)

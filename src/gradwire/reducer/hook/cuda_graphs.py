"""Captured reductions: what a hook does between its collectives as CUDA graphs, recorded once per bucket and replayed.

Note [Captured reductions]
On a GPU a hook of many kernels costs the host more time than the device. Buckets are static buffers, and a hook's state changes in
place, so the same kernels on the same addresses are the reduction of every step: a segment between two collectives becomes a CUDA
graph, and a step is one launch per segment, with the collectives in between. These are submitted as always: no graph contains
one, so a rank may capture, or fall back, alone. Which reductions are alike is the hook's `capture_key`.

The first reduction of a bucket runs eagerly: it compiles kernels, and may complete the state. After one that changed nothing that
the state holds on the host, the next is captured, which computes and sends nothing, and then replayed. Numbers that change with
each step, such as keys of random numbers, are on the device (`Turn.on_device`) and are written before each replay.
All graphs share one memory pool. What a segment allocates is freed after its capture and used by the next bucket's: reductions of a
device follow each other on one stream, so the collectives are given addresses, not tensors that would keep memory from the next
bucket.

Note [What a capture disturbs]
cuBLAS has a workspace for each stream, which torch frees when anyone compiles with CUDA graphs: so that of the eager reductions is
freed before a capture, which allocates it in the graphs' pool. The garbage collector may free what must not be freed then.
Other threads cannot draw from the device's generator meanwhile, and nobody can after a capture that failed, until another one ends.
"""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from gradwire.collectives import Collective
from gradwire.collectives.aliasing import is_plain
from gradwire.hooks.base import CommHook, Reduced, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.pump import advance, run_by
from gradwire.hooks.state import held

LARGEST_BUCKET = 64 * 2**20
"""In bytes. A larger one runs eagerly: its graphs would keep a multiple of its memory, and launches are little of its time."""
_WORTH_IT = 16
"""Replays of a capture; a bucket whose memory or state changes sooner three times in a row is not captured again."""
_NUMBERS = 64
"""Numbers of a reduction that may change with each replay."""
_MOST = 32
"""Kinds of reductions that are kept for a bucket. With more, as if the weight changes in each step, all are forgotten."""

Start = Callable[[Turn], Reduction]
Submit = Callable[[Collective], Any]


@dataclass(slots=True)
class _Bucket:
    """A bucket that was reduced: what its graphs depend on, and the graphs once there are any."""

    address: int
    state: Any
    wasted: int  # captures in a row that were replayed too few times
    changed_state: bool | None = None  # whether the last reduction changed what the state holds on the host
    segments: list[tuple[torch.cuda.CUDAGraph, Collective | None]] = field(default_factory=list)
    numbers: list[tuple[Tensor, Callable[[Turn], int]]] = field(default_factory=list)  # of `Turn.on_device`
    replays: int = 0

    def moved(self, address: int, state: Any) -> _Bucket:
        """The bucket with other memory or state."""
        wasted = self.wasted + 1 if self.replays < _WORTH_IT else 0
        return _Bucket(address, state, wasted if self.segments else self.wasted)

    def place_numbers(self, device: torch.device) -> Callable[[Callable[[Turn], int]], Tensor]:
        """Not in the memory of the graphs, where kernels of a graph may write before others read."""
        room = torch.empty((_NUMBERS, 1), dtype=torch.int64, device=device)

        def varying(number: Callable[[Turn], int]) -> Tensor:
            self.numbers.append((room[len(self.numbers)], number))
            return self.numbers[-1][0]

        return varying


class CapturedReductions:
    """Runs the reductions of one hook on one model, captured where possible. See Note [Captured reductions]."""

    enabled = os.environ.get("GRADWIRE_CAPTURE") != "0"
    """For all models."""

    def __init__(self) -> None:
        self._hook: CommHook | None = None
        self._specs: dict[int, BucketSpec] = {}
        self._buckets: dict[tuple[Any, ...], _Bucket] = {}
        self._first: torch.cuda.CUDAGraph | None = None  # empty: it keeps the memory pool of all others
        self._refused: CommHook | None = None

    def run(self, start: Start, hook: CommHook, grad: Tensor, state: Any, turn: Turn, submit: Submit) -> Tensor:
        """The value of the reduction that `start(turn)` makes; on the current stream, which is not the default one."""
        fits = self.enabled and self._refused is not hook and not grad.is_sparse and 0 < grad.nbytes <= LARGEST_BUCKET
        key = hook.capture_key(turn) if fits else None
        if key is None or torch.cuda.is_current_stream_capturing():
            return self._run_eagerly(start, state, turn, submit)[0]
        bucket = self._bucket(hook, key, grad, state, turn)
        if not bucket.segments:
            if bucket.changed_state is not False:
                return self._first_run(bucket, start, hook, turn, submit)
            if bucket.wasted >= 3 or torch.cuda.get_allocator_backend() != "native":  # others have no pools for graphs
                return run_by(submit, start(turn))
            try:
                if self._first is None:
                    self._first = _empty_graph()
                varying = bucket.place_numbers(grad.device)
                bucket.segments = _capture(start(replace(turn, varying=varying)), grad, self._first.pool())
            except Exception as error:
                self._refuse(hook, turn, str(error).partition("\n")[0])
                return run_by(submit, start(turn))
        bucket.replays += 1
        for place, number in bucket.numbers:
            place.fill_(number(turn))
        for graph, op in bucket.segments:
            graph.replay()
            if op is not None:
                submit(op).wait()
        return grad

    def _bucket(self, hook: CommHook, key: Any, grad: Tensor, state: Any, turn: Turn) -> _Bucket:
        known = self._specs.setdefault(turn.spec.index, turn.spec)
        if self._hook is not hook or (known is not turn.spec and known != turn.spec):
            self.drop()
            self._hook, self._specs[turn.spec.index] = hook, turn.spec
        name, address = (turn.spec.index, key, turn.rank, turn.world_size, turn.divisor, turn.weight), grad.data_ptr()
        bucket = self._buckets.get(name)
        if bucket is None and len(self._buckets) >= _MOST * len(self._specs):
            self._buckets.clear()
        if bucket is not None and bucket.state is not state and _on_host(bucket.state) == _on_host(state):
            bucket.state = state  # in the same memory, after a rollback
        if bucket is None or bucket.address != address or bucket.state is not state:
            made = _Bucket(address, state, 0) if bucket is None else bucket.moved(address, state)
            bucket = self._buckets[name] = made
        return bucket

    def _first_run(self, bucket: _Bucket, start: Start, hook: CommHook, turn: Turn, submit: Submit) -> Tensor:
        again = bucket.changed_state
        value, bucket.changed_state = self._run_eagerly(start, bucket.state, turn, submit)
        if bucket.changed_state and again:  # not if it is only completed in the first reduction
            self._refuse(hook, turn, "it puts new tensors or numbers into its state")
        return value

    def _run_eagerly(self, start: Start, state: Any, turn: Turn, submit: Submit) -> tuple[Tensor, bool]:
        """Also whether it changed what the state holds on the host: then graphs for other keys, which contain it, are forgotten."""
        before = _on_host(state) if self._buckets else None
        value = run_by(submit, start(turn))
        changed = before is not None and _on_host(state) != before
        for name, bucket in self._buckets.items():
            if changed and bucket.segments and name[0] == turn.spec.index:
                self._buckets[name] = bucket.moved(bucket.address, state)
        return value, changed

    def drop(self) -> None:
        """Free all graphs and their memory."""
        self._specs.clear()
        self._buckets.clear()
        self._hook = self._first = None

    def _refuse(self, hook: CommHook, turn: Turn, why: str) -> None:
        self.drop()
        self._refused = hook
        warnings.warn(
            f"capturing {hook!r} on {turn.spec} as CUDA graphs failed: {why}. It runs eagerly from now on, which costs host time. "
            "A captured reduction must not read tensors on the host, as item() and nonzero() do, and must change its state in "
            "place. Change it, or use capture(hook, enabled=False).",
            stacklevel=2,
        )


def _capture(reduction: Reduction, grad: Tensor, pool: Any) -> list[tuple[torch.cuda.CUDAGraph, Collective | None]]:
    """The segments of a reduction, each with the collective that follows; after the last, the value is in `grad`."""
    segments: list[tuple[torch.cuda.CUDAGraph, Collective | None]] = []
    with _undisturbed():
        while not segments or segments[-1][1] is not None:
            graph = torch.cuda.CUDAGraph()
            _begin(graph, pool)
            try:
                step = advance(reduction)
                if isinstance(step, Reduced):
                    _put(step.value, grad)
                _end(graph)
            except BaseException:
                reduction.close()
                _abandon(graph, grad.get_device(), pool)
                raise
            segments.append((graph, None if isinstance(step, Reduced) else _by_address(step)))
    return segments


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """See Note [What a capture disturbs]."""
    torch.cuda.current_blas_handle()  # which cannot be made in a capture
    torch._C._cuda_clearCublasWorkspaces()
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _put(value: Tensor, grad: Tensor) -> None:
    if value.data_ptr() != grad.data_ptr() or not is_plain(value):
        shares = value.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
        grad.copy_(value.reshape(-1).clone() if shares else value.reshape(-1))


def _begin(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    # Not "global": other threads, such as NCCL's watchdog, may call what a capture forbids.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # as between two collectives in a row
        graph.capture_end()


def _empty_graph() -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    _begin(graph, None)
    _end(graph)
    return graph


def _abandon(graph: torch.cuda.CUDAGraph, device: int, pool: Any) -> None:
    """End a capture that failed. torch leaves allocator and generator in it if CUDA has invalidated the capture."""
    try:
        graph.capture_end()
    except RuntimeError:
        with contextlib.suppress(AttributeError, RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        with contextlib.suppress(RuntimeError):
            _empty_graph()


def _by_address(op: Collective) -> Collective:
    made: dict[int, Tensor] = {}  # the inputs of an all-reduce are its outputs
    inputs, outputs = (tuple(made.setdefault(id(t), _alias(t)) for t in tensors) for tensors in (op.inputs, op.outputs))
    return replace(op, inputs=inputs, outputs=outputs)


class _Memory:
    """The memory of a contiguous tensor, in the form in which CUDA libraries exchange it: it is not kept alive."""

    def __init__(self, t: Tensor) -> None:
        what = {"shape": (t.nbytes,), "typestr": "|u1", "data": (t.data_ptr(), False), "version": 2}
        self.__cuda_array_interface__ = what


def _alias(t: Tensor) -> Tensor:
    if not is_plain(t) or not t.nbytes:
        return t
    return torch.as_tensor(_Memory(t), device=t.device).view(t.dtype).view(t.shape)


def _on_host(state: Any, depth: int = 12) -> list[Any]:
    """What a state holds on the host: addresses of tensors, and numbers. A captured reduction must not change it."""
    if isinstance(state, Tensor):
        return [state.data_ptr()]
    if isinstance(state, Number | str):
        return [state]
    return [found for part in held(state) for found in _on_host(part, depth - 1)] if depth else []

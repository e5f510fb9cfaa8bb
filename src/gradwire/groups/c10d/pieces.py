"""Large exchanges over gloo, cut into pieces that are under way together.

Note [Why in pieces]
Gloo moves a message over one connection from a single buffer, and while it writes a long one it hardly reads. When two ranks send
each other something at the same time, as in an all-to-all or an all-gather, a link that carries both directions at once is then
often used in one after the other: 3.6 MB each way over 100 Mbit/s took between 0.30 and 0.60 s where the link needs 0.29. In pieces
of 256 KiB, all begun at once, it took 0.30 to 0.35. Over 1 Gbit/s it made no difference (0.031 s, and 0.028 in one piece, which now
and then took 0.054). Only between processes of one machine, where nothing waits for a wire, pieces cost: 12 ms instead of 5. Shared
memory is for those. Gloo's own ring all-reduce goes in segments already.

Every rank cuts alike: only what has the same size on all of them is cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from gradwire.collectives import Collective, OpKind
from gradwire.collectives.lower import as_bytes

PIECE = 256 * 1024
"""Bytes to each peer."""
_MOST = 64
_MARGIN = timedelta(milliseconds=2)

Call = Callable[[Any, Collective, float], Any]
Step = tuple[Any, Callable[[], object]]
"""c10d's Work of a piece, and what is to do when it is over."""


def cut(pg: Any, op: Collective, timeout: float, call: Call) -> Any:
    """`op`, begun in pieces, as something to be waited for like c10d's Work; None if it is not to be cut."""
    equal = op.kind is OpKind.ALL_GATHER_INTO_TENSOR or (op.kind is OpKind.ALL_TO_ALL_SINGLE and op.splits is None)
    if not equal or op.device.type != "cpu" or len(op.inputs) != 1 or pg.size() == 1:
        return None
    whole = op.outputs[0].nbytes // pg.size()
    if whole < 2 * PIECE:
        return None
    ins, outs = as_bytes(op.inputs[0]), as_bytes(op.outputs[0]).view(pg.size(), whole)
    if op.kind is OpKind.ALL_TO_ALL_SINGLE:
        ins = ins.view(outs.shape)
    length = max(PIECE, -(-whole // _MOST // 16) * 16)

    def begin(at: int) -> Step:
        place = outs[:, at : at + length]
        sent = ins[..., at : at + length].contiguous()
        came = torch.empty_like(place, memory_format=torch.contiguous_format)
        native = call(pg, replace(op, inputs=(sent.view(-1),), outputs=(came.view(-1),)), timeout)
        return native, lambda: place.copy_(came)

    return Pieces([begin(at) for at in range(0, whole, length)])


class Pieces:
    """What c10d's Work is to those who wait: over when every piece is, and every piece in its place."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps[::-1]
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; raises what a piece raised, or after `timeout` a RuntimeError as c10d does."""
        deadline = None if timeout is None else time.perf_counter() + timeout.total_seconds()
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout.total_seconds()):
            raise RuntimeError("another thread waits for the pieces of this operation, and has not come to their end")
        try:
            while self._steps:
                native, put = self._steps[-1]
                if deadline is None:
                    native.wait()
                else:
                    native.wait(max(_MARGIN, timedelta(seconds=deadline - time.perf_counter())))
                put()
                self._steps.pop()
        finally:
            self._lock.release()
        return True

    def is_completed(self) -> bool:
        """Whether the engine is done with all of them, well or badly."""
        return all(native.is_completed() for native, _ in list(self._steps))

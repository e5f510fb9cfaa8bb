"""`broadcast_coalesced`: broadcast many tensors in few operations (torch: c10d/comm.hpp)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.collectives import broadcast
from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups.base import Group
from gradwire.groups.work import Work

Piece = tuple[int, int, int]
"""(tensor index, first element, one past the last)."""

_IN_FLIGHT = 2


def plan(tensors: Sequence[Tensor], buffer_size: int) -> Iterator[list[Piece]]:
    """Assign the tensors to buffers of one dtype and device and at most `buffer_size` bytes, splitting larger tensors.

    >>> list(plan([torch.zeros(3), torch.zeros(2), torch.zeros(1, dtype=torch.int64)], buffer_size=16))
    [[(0, 0, 3), (1, 0, 1)], [(1, 1, 2)], [(2, 0, 1)]]
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(tensors):
        by_kind.setdefault((t.dtype, t.device), []).append(i)
    for (dtype, _), indices in by_kind.items():
        room = capacity = max(1, buffer_size // dtype.itemsize)
        pieces: list[Piece] = []
        for i in indices:
            start, numel = 0, tensors[i].numel()
            while start < numel:
                stop = min(numel, start + room)
                pieces.append((i, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield pieces
                    pieces, room = [], capacity
        if pieces:
            yield pieces


@torch.no_grad()
def broadcast_coalesced(
    group: Group, tensors: Sequence[Tensor], *, buffer_size: int = 250 * 2**20, src: int = 0
) -> None:
    """Make `tensors` equal to those of rank `src`, in place, with two buffers in flight at a time. A no-op without tensors."""
    tensors = list(tensors)
    for t in tensors:
        if not isinstance(t, Tensor) or t.layout is not torch.strided:
            what = f"a {t.layout} tensor" if isinstance(t, Tensor) else type(t).__name__
            raise UsageTypeError(f"broadcast_coalesced: expected dense tensors, got {what}.")
    if buffer_size <= 0:
        raise UsageError(f"broadcast_coalesced: buffer_size {buffer_size}. It must be more than 0 bytes.")
    if not 0 <= src < group.size:
        raise UsageError(f"broadcast_coalesced: src {src}, but the group has ranks 0 to {group.size - 1}.")
    flat = [t.detach().reshape(-1) for t in tensors]  # copies of those that are not contiguous
    flight: deque[tuple[Work, list[Piece], Tensor]] = deque()

    def land() -> None:
        work, pieces, buffer = flight.popleft()
        work.wait()
        parts = buffer.split([stop - start for _, start, stop in pieces])
        for (i, start, stop), part in zip(pieces, parts, strict=True):
            if flat[i][start:stop].data_ptr() != part.data_ptr():
                flat[i][start:stop].copy_(part)

    for number, pieces in enumerate(plan(tensors, buffer_size)):
        rows = [flat[i][start:stop] for i, start, stop in pieces]
        buffer = rows[0] if len(rows) == 1 else torch.cat(rows)
        flight.append((group.submit(broadcast(buffer, src=src, label=f"broadcast_coalesced {number}")), pieces, buffer))
        if len(flight) == _IN_FLIGHT:
            land()
    while flight:
        land()
    for t, row in zip(tensors, flat, strict=True):
        if not t.is_contiguous():
            t.detach().copy_(row.view(t.shape))

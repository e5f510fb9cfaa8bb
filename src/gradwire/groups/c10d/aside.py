"""CUDA streams for threads that work for others.

Note [CUDA tensors over an engine of the host]
Gloo takes CUDA tensors and works on the host: it reads them after what the current stream of the calling thread holds, and whoever
waits for it has the result on the stream that is current there. But streams are current by thread: the lane and the reaper know
nothing of the stream on which a gradient was made, nor of the one on which it will be read. So they work `Aside`, on a stream of
their own that follows what the submitter's had enqueued, and wait for it: a Work that is over has its result in memory, for
every stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Aside:
    """A stream of its own on each CUDA device. See Note [CUDA tensors over an engine of the host]."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def __call__(self, device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """On that stream, behind `after`; at the end the device has done what was enqueued. On the CPU nothing."""
        if device.type != "cuda":
            yield
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        with torch.cuda.device(device), torch.cuda.stream(side):
            if after is not None:
                side.wait_event(after)
            yield
            side.synchronize()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """What the current stream of a CUDA device holds by now. None elsewhere."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event

"""Side CUDA streams for the worker threads.

Note [CUDA tensors over a host engine]
Gloo takes CUDA tensors and works on the host: it reads them in the order of the calling thread's current stream, and the result is
ordered before later work on the waiting thread's current stream. But the current stream is thread-local: the lane and the poller
do not see the stream on which a gradient was computed, nor the one on which it will be read. So they use `SideStreams`: a separate
stream that waits for what the submitter had enqueued. They synchronize it, so the result of a finished Work is visible to every
stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStreams:
    """One side stream per CUDA device. See Note [CUDA tensors over a host engine]."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @contextlib.contextmanager
    def __call__(self, device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run the block on that stream after `after`, then synchronize it. No effect on the CPU."""
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
    """An event recorded on the current stream of a CUDA device; None for other devices."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event

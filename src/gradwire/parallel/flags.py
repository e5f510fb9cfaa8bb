"""torch's flags, turned into policies."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from gradwire.policies import BucketMemory, Buckets, Buffers, Gradients, Graph, MiB


@dataclass(frozen=True, slots=True)
class Flags:
    """The arguments of torch's constructor that control reduction."""

    find_unused: bool = False
    static: bool = False
    views: bool = False
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    cap_mb: float | None = None
    cap_mb_list: tuple[float, ...] = ()
    skip_unused: bool = False
    lazy_buckets: bool = False

    def __post_init__(self) -> None:
        if self.broadcast_buffers is None:
            return
        if self.forward_sync_buffers is not None:
            text = "`broadcast_buffers` is deprecated, and ignored because `forward_sync_buffers` is given too."
        else:
            text = "`broadcast_buffers` is deprecated. Use `forward_sync_buffers`, which keeps the synchronization at start."
        warnings.warn(text, FutureWarning, stacklevel=4)

    @property
    def graph(self) -> Graph:
        """Static takes precedence over searching, as in torch."""
        if self.static:
            return Graph.STATIC
        return Graph.FIND_UNUSED if self.find_unused else Graph.ALL_USED

    @property
    def gradients(self) -> Gradients:
        """Where `.grad` lives."""
        return Gradients.VIEWS if self.views else Gradients.COPIES

    @property
    def buffers(self) -> Buffers:
        """The old flag also controls the synchronization at start, the new one does not."""
        if self.forward_sync_buffers is not None:
            return Buffers.EVERY_FORWARD if self.forward_sync_buffers else Buffers.AT_START
        return Buffers.NEVER if self.broadcast_buffers is False else Buffers.EVERY_FORWARD

    @property
    def bytes_cap_list(self) -> tuple[int, ...]:
        """Caps of single buckets, in bytes."""
        return tuple(int(mb * MiB) for mb in self.cap_mb_list)

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest bucket, in bytes."""
        if self.cap_mb_list:
            return max(self.bytes_cap_list)
        return int((25 if self.cap_mb is None else self.cap_mb) * MiB)

    @property
    def buckets(self) -> Buckets:
        """The first bucket is small only if the user did not choose a size."""
        memory = BucketMemory.DURING_BACKWARD if self.lazy_buckets else BucketMemory.KEPT
        if self.cap_mb_list:
            return Buckets(self.bytes_cap_list, from_start=True, memory=memory)
        if self.cap_mb is None:
            return Buckets(memory=memory)
        return Buckets((max(1, self.bucket_bytes_cap),), memory=memory)

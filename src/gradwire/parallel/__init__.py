"""Data-parallel models."""

from gradwire.parallel.broadcast import broadcast_coalesced
from gradwire.parallel.ddp import DistributedDataParallel

__all__ = ["DistributedDataParallel", "broadcast_coalesced"]

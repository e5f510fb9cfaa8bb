"""Data-parallel models."""

from gradwire.parallel.balance import Balance
from gradwire.parallel.ddp import DistributedDataParallel
from gradwire.parallel.divergence import DivergenceCheck
from gradwire.parallel.module_state import broadcast_coalesced
from gradwire.parallel.replica import Replica
from gradwire.parallel.replicate import replicate

__all__ = ["Balance", "DistributedDataParallel", "DivergenceCheck", "Replica", "broadcast_coalesced", "replicate"]

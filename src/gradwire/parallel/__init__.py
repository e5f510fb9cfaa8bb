"""Data-parallel models."""

import os

from gradwire.parallel.ddp import DistributedDataParallel
from gradwire.parallel.divergence import DivergenceCheck
from gradwire.parallel.module_state import broadcast_coalesced
from gradwire.parallel.replica import Replica
from gradwire.parallel.replicate import replicate
from gradwire.reducer.hook.cuda_graphs import CapturedReductions

CapturedReductions.enabled = os.environ.get("GRADWIRE_CAPTURE") == "1"
__all__ = ["DistributedDataParallel", "DivergenceCheck", "Replica", "broadcast_coalesced", "replicate"]

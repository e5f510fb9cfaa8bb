"""Imported by the fork server: what numba imports when a loop is compiled or loaded for the first time takes half a second."""

import torch

from gradwire.collectives import ReduceOp
from gradwire.groups.shared_memory.fold import CompiledFold

CompiledFold.find(ReduceOp.SUM, torch.float32, 2)

"""Imported by the process from which the ranks of an elastic run are forked: what a rank that joins would otherwise load while the
others wait for it. An optimizer imports torch._dynamo when its state is first loaded, and numba takes a second for a first loop."""

import itertools
import os

import torch
import torch._dynamo

from gradwire.collectives import ReduceOp
from gradwire.elasticity import run as run
from gradwire.groups.shared_memory.fold import CompiledFold

size = int(os.environ.get("WORLD_SIZE", "2"))
for op, ranks in itertools.product((ReduceOp.SUM, ReduceOp.AVG), range(size - 1, size + 2)):
    CompiledFold.find(op, torch.float32, ranks)

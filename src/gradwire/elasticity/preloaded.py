"""Imported by the process from which the ranks of an elastic run are forked: what a rank that joins would otherwise load while the
others wait for it. An optimizer imports torch._dynamo when its state is first loaded, and numba takes a second for a first loop."""

import os

import torch
import torch._dynamo

from gradwire.elasticity import run as run
from gradwire.elasticity.view_groups import ViewGroups

ViewGroups(timeout=0.0).warm(int(os.environ.get("WORLD_SIZE", "2")), [torch.float32])

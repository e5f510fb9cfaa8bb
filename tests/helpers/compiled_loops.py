"""Imported by the fork server: what numba imports when a loop is compiled or loaded for the first time takes half a second."""

import atexit
import sys

import torch

from gradwire.collectives import ReduceOp
from gradwire.groups.shared_memory import engine
from gradwire.groups.shared_memory.fold import CompiledFold

CompiledFold.find(ReduceOp.SUM, torch.float32, 2)
engine._YIELDS = 40  # of 800: a rank that yields for a millisecond takes the core from another worker's test

if "tqdm" in sys.modules:  # its first progress bar starts a thread
    sys.modules["tqdm"].tqdm.monitor_interval = 0
if "colorama.initialise" in sys.modules:  # numba imports it, and every fork would write its escape sequence at exit
    atexit.unregister(sys.modules["colorama.initialise"].reset_all)

"""gradwire: data-parallel training for PyTorch in which everything between autograd and the wire is plain Python.

>>> import torch, gradwire as gw
>>> a, b = gw.ThreadGroup.world(2)
>>> x, y = torch.tensor([1.0]), torch.tensor([3.0])
>>> work = a.all_reduce(x, gw.ReduceOp.AVG, async_op=True)
>>> b.all_reduce(y, gw.ReduceOp.AVG).wait() and work.wait()
True
>>> x, y
(tensor([2.]), tensor([2.]))
>>> a.close(), b.close()
(None, None)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# The layers as modules, so that `gw.collectives.all_reduce(t)` and `gw.groups.Deadline` need no second import.
from gradwire import autograd, collectives, errors, events, groups, hooks, interop, policies

# collectives: operations as values
from gradwire.collectives import Collective, Kind, ReduceOp, Signature

# errors
from gradwire.errors import (
    ClosedError,
    CollectiveMismatch,
    CollectiveTimeout,
    GradwireError,
    GroupAborted,
    GroupError,
    HookError,
    InternalError,
    LayoutError,
    NonFiniteGradient,
    PeerLost,
    UsageError,
)

# groups: who takes part and how bytes move
from gradwire.groups import (
    C10dGroup,
    Deadline,
    Group,
    GroupWrapper,
    HierarchicalGroup,
    Latched,
    MPIGroup,
    NanCheck,
    Recording,
    SharedMemoryGroup,
    ThreadGroup,
    Verified,
    Work,
    WorkInfo,
)

# interop: torch's process groups in ours, ours in torch
from gradwire.interop import as_process_group, from_process_group, register_backend

# parallel: models whose gradients are averaged
from gradwire.parallel import DistributedDataParallel, Replica, broadcast_coalesced, replicate

if TYPE_CHECKING:
    from gradwire import lab, launch, testing
    from gradwire.launch import init

__version__ = "0.1.0"

# Training does not need the machinery of tests, nor a rank of torch's the launcher's: imported by the first who names them.
_LAZY = frozenset({"lab", "launch", "testing"})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"gradwire.{name}")
    if name == "init":  # launch: find the world that a launcher started
        return importlib.import_module("gradwire.launch").init
    raise AttributeError(f"module 'gradwire' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "init"})


__all__ = [
    "C10dGroup",
    "ClosedError",
    "Collective",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "Deadline",
    "DistributedDataParallel",
    "GradwireError",
    "Group",
    "GroupAborted",
    "GroupError",
    "GroupWrapper",
    "HierarchicalGroup",
    "HookError",
    "InternalError",
    "Kind",
    "Latched",
    "LayoutError",
    "MPIGroup",
    "NanCheck",
    "NonFiniteGradient",
    "PeerLost",
    "Recording",
    "ReduceOp",
    "Replica",
    "SharedMemoryGroup",
    "Signature",
    "ThreadGroup",
    "UsageError",
    "Verified",
    "Work",
    "WorkInfo",
    "__version__",
    "as_process_group",
    "autograd",
    "broadcast_coalesced",
    "collectives",
    "errors",
    "events",
    "from_process_group",
    "groups",
    "hooks",
    "init",
    "interop",
    "lab",
    "launch",
    "policies",
    "register_backend",
    "replicate",
    "testing",
]

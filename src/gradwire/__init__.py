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
import sys
from typing import TYPE_CHECKING, Any

from gradwire.runtime.lazy import lazy

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` imports what `_NAMES` lists
    from gradwire import (
        autograd as autograd,
        collectives as collectives,
        errors as errors,
        events as events,
        groups as groups,
        hooks as hooks,
        integrations as integrations,
        interop as interop,
        lab as lab,
        launch as launch,
        observe as observe,
        optim as optim,
        policies as policies,
        testing as testing,
    )
    from gradwire.collectives import (
        Collective as Collective,
        OpKind as OpKind,
        ReduceOp as ReduceOp,
        Signature as Signature,
    )
    from gradwire.elasticity.deal import Deal as Deal
    from gradwire.errors import (
        ClosedError as ClosedError,
        CollectiveMismatch as CollectiveMismatch,
        CollectiveTimeout as CollectiveTimeout,
        GradwireError as GradwireError,
        GroupAborted as GroupAborted,
        GroupError as GroupError,
        HookError as HookError,
        InternalError as InternalError,
        LayoutError as LayoutError,
        NonFiniteGradient as NonFiniteGradient,
        PeerLost as PeerLost,
        ReplicasDiverged as ReplicasDiverged,
        StepError as StepError,
        UsageError as UsageError,
    )
    from gradwire.groups import (
        C10dGroup as C10dGroup,
        Deadline as Deadline,
        Group as Group,
        GroupKind as GroupKind,
        GroupWrapper as GroupWrapper,
        HierarchicalGroup as HierarchicalGroup,
        Latched as Latched,
        MPIGroup as MPIGroup,
        NanCheck as NanCheck,
        Recording as Recording,
        SharedMemoryGroup as SharedMemoryGroup,
        ThreadGroup as ThreadGroup,
        Verified as Verified,
        Work as Work,
        WorkInfo as WorkInfo,
        register_kind as register_kind,
    )
    from gradwire.interop import (
        HookedGroup as HookedGroup,
        as_process_group as as_process_group,
        from_process_group as from_process_group,
        register_backend as register_backend,
    )
    from gradwire.launch import elastic as elastic, init as init
    from gradwire.parallel import (
        Balance as Balance,
        DistributedDataParallel as DistributedDataParallel,
        DivergenceCheck as DivergenceCheck,
        Replica as Replica,
        broadcast_coalesced as broadcast_coalesced,
    )
    from gradwire.parallel.replicate import replicate as replicate

__version__ = "0.1.0"

# Lazy imports: the command `gradwire` and the launcher do not need torch, and training does not need the testing tools.
_NAMES = {
    "": "autograd collectives errors events groups hooks integrations interop lab launch observe optim policies testing",
    "collectives": "Collective OpKind ReduceOp Signature",
    "errors": "ClosedError CollectiveMismatch CollectiveTimeout GradwireError GroupAborted GroupError HookError InternalError "
    "LayoutError NonFiniteGradient PeerLost ReplicasDiverged StepError UsageError",
    "groups": "C10dGroup Deadline Group GroupKind GroupWrapper HierarchicalGroup Latched MPIGroup NanCheck Recording "
    "SharedMemoryGroup ThreadGroup Verified Work WorkInfo register_kind",
    "interop": "HookedGroup as_process_group from_process_group register_backend",
    "elasticity.deal": "Deal",
    "launch": "elastic init",
    "parallel": "Balance DistributedDataParallel DivergenceCheck Replica broadcast_coalesced replicate",
}


def _announce_backend() -> None:
    """Once torch.distributed is imported, make `dist.init_process_group("gradwire")` work, as `register_backend()` does.

    This imports nothing: `create` does when torch calls it.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not hasattr(dist, "init_process_group") or "gradwire" in dist.Backend.backend_list:
        return

    def create(options: Any, backend_options: Any) -> Any:
        return importlib.import_module("gradwire.interop.backend").creator_of("gradwire")(options, backend_options)

    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add("gradwire")  # see register_backend
    dist.Backend.register_backend("gradwire", create, extended_api=True, devices=["cpu", "cuda"])


_announce_backend()
lazy(__name__, _NAMES, then=_announce_backend)
__all__ = [*" ".join(_NAMES.values()).split(), "__version__"]

"""Between gradwire and torch.distributed: each other's groups, gradwire as a backend, our hooks in torch's DDP and FSDP."""

from gradwire.interop.backend import register_backend
from gradwire.interop.ddp_hook import as_torch_hook
from gradwire.interop.fsdp import as_fsdp_hook, as_fsdp_reduce_scatter, fsdp_parameters
from gradwire.interop.fsdp_checks import FsdpChecks
from gradwire.interop.hooked_group import HookedGroup
from gradwire.interop.process_group import GradwireProcessGroup, as_process_group, from_process_group
from gradwire.interop.sharded_outer import ShardedOuterSteps, outer_steps_on_shards
from gradwire.interop.work import TorchWork

__all__ = [
    "FsdpChecks",
    "GradwireProcessGroup",
    "HookedGroup",
    "ShardedOuterSteps",
    "TorchWork",
    "as_fsdp_hook",
    "as_fsdp_reduce_scatter",
    "as_process_group",
    "as_torch_hook",
    "from_process_group",
    "fsdp_parameters",
    "outer_steps_on_shards",
    "register_backend",
]

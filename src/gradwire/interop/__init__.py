"""Between gradwire and torch.distributed: each other's groups, and gradwire as a back end of torch."""

from gradwire.interop.backend import register_backend
from gradwire.interop.process_group import GradwireProcessGroup, as_process_group, from_process_group
from gradwire.interop.work import TorchWork

__all__ = ["GradwireProcessGroup", "TorchWork", "as_process_group", "from_process_group", "register_backend"]

"""Between autograd and the reducer: hooks on tensors and nodes, "this gradient is ready", and what a backward can reach.

Knows torch's engine and nothing of buckets, groups or `torch.distributed`.
"""

from gradwire.autograd.attach import after_accumulate, after_node, attach, before_node, on_grad
from gradwire.autograd.chain import HookChain, Kind
from gradwire.autograd.graph import reachable_parameters, tensors_in
from gradwire.autograd.ready import GradReady

__all__ = [
    "GradReady",
    "HookChain",
    "Kind",
    "after_accumulate",
    "after_node",
    "attach",
    "before_node",
    "on_grad",
    "reachable_parameters",
    "tensors_in",
]

"""Between autograd and the reducer: hooks on tensors and nodes, "this gradient is ready", and what a backward can reach.

Knows torch's engine and nothing of buckets, groups or `torch.distributed`.
"""

from gradwire.autograd.backward_end import at_backward_end
from gradwire.autograd.grad_hooks import GradHooks
from gradwire.autograd.graph import reachable_parameters, tensors_in
from gradwire.autograd.user_hooks.attach import after_accumulate, after_node, attach, before_node, on_grad
from gradwire.autograd.user_hooks.checked_hook import Kind

__all__ = [
    "GradHooks",
    "Kind",
    "after_accumulate",
    "after_node",
    "at_backward_end",
    "attach",
    "before_node",
    "on_grad",
    "reachable_parameters",
    "tensors_in",
]

"""torch's own communication hooks, with their settings: what ours are compared with. Imported by whoever measures them, since
some take their time to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Hook = tuple[Any, Callable[[Any, Any], Any]]
"""A state and a function of it and a bucket, as `register_comm_hook` takes them."""


DENSE_STEPS = 2
"""Steps that `power_sgd` takes before it compresses."""


def fp16(process_group: Any) -> Hook:
    """`fp16_compress_hook`."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    return process_group, default_hooks.fp16_compress_hook


def power_sgd(process_group: Any) -> Hook:
    """`powerSGD_hook` with rank 4, from the third step on, the first that it allows with error feedback; before it is dense."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(process_group, matrix_approximation_rank=4, start_powerSGD_iter=DENSE_STEPS)
    return state, powerSGD_hook.powerSGD_hook


TORCH_HOOKS: Mapping[str, Callable[[Any], Hook]] = MappingProxyType({"torch-fp16": fp16, "torch-powersgd": power_sgd})
LEFT_OUT = (
    "torch's quantization hooks take no part: they read the result of an all-gather in a form that only NCCL gives, so they run on "
    "neither gloo nor a group in Python."
)

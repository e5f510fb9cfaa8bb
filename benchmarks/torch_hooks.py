"""torch's own communication hooks, with their settings, for comparison with ours. Imported only where they are measured, since
some are slow to import."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Hook = tuple[Any, Callable[[Any, Any], Any]]
"""The arguments of `register_comm_hook`: a state, and a function of it and a bucket."""

_HOME = "torch.distributed.algorithms.ddp_comm_hooks"
DENSE_STEPS = 2
"""Steps of `power_sgd` before it compresses."""


def _stateless(module: str, name: str) -> Callable[[Any], Hook]:
    """A hook whose state is its process group."""
    return lambda process_group: (process_group, getattr(importlib.import_module(f"{_HOME}.{module}"), name))


def power_sgd(process_group: Any) -> Hook:
    """`powerSGD_hook` with rank 4, from the third step on, the first that it allows with error feedback; before that, dense."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(process_group, matrix_approximation_rank=4, start_powerSGD_iter=DENSE_STEPS)
    return state, powerSGD_hook.powerSGD_hook


# Its batched_powerSGD_hook is not here: it fails an assertion of its own when it first compresses (torch 2.11 to 2.13).
TORCH_HOOKS: Mapping[str, Callable[[Any], Hook]] = MappingProxyType(
    {
        "torch-allreduce": _stateless("default_hooks", "allreduce_hook"),
        "torch-fp16": _stateless("default_hooks", "fp16_compress_hook"),
        "torch-bf16": _stateless("default_hooks", "bf16_compress_hook"),
        "torch-powersgd": power_sgd,
    }
)
NCCL_HOOKS: Mapping[str, tuple[Callable[[Any], Hook], Callable[[int], float]]] = MappingProxyType(
    {
        # 8 bits, with one scale for the bucket, and with a scale for every 512 elements
        "torch-quantize": (_stateless("quantization_hooks", "quantization_pertensor_hook"), lambda numel: numel + 8),
        "torch-quantize-channels": (
            _stateless("quantization_hooks", "quantization_perchannel_hook"),
            lambda numel: (numel // 512 + 1) * (512 + 8),
        ),
    }
)
"""Those that read the result of an all-gather in a form that only NCCL returns, so they run on neither gloo nor a group in Python;
with the bytes that a rank sends to each of the others: one byte per element, and a scale and a zero point as float32."""
LEFT_OUT = (
    "torch's quantization hooks run only on CUDA: they read an all-gather's result in a form that only NCCL returns."
)
